"""Fixtures of several tests: a tiny model, a data set, a world of one rank, a folder for weights."""

import json
from contextlib import contextmanager

import pytest

from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A data set of words to be reversed."""
    file = tmp_path_factory.mktemp("words") / "words.jsonl"
    pairs = [f"{a}{b}c" for a in "abcdef" for b in "ghijklm"]
    chats = [[{"role": "user", "content": w}, {"role": "assistant", "content": w[::-1]}] for w in pairs]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


@contextmanager
def one_rank():
    import torch
    import torch.distributed as dist

    from prime_rl.trainer.parallel.process_group import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def world():
    with one_rank() as world:
        yield world


@pytest.fixture(scope="module")
def module_world():
    """One world for all tests of a module."""
    with one_rank() as world:
        yield world


@pytest.fixture
def weights(tmp_path):
    return tmp_path / "run" / "weights"
