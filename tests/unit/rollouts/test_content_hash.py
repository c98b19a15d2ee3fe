"""The hash of an environment's examples: the same in every process, another one for other examples."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prime_rl.configs.environment import EnvConfig
from prime_rl.rollouts import environment_backend
from prime_rl.rollouts.environment_backend import EnvironmentBackend
from tests.support.fake_engine import publish_version


class Rows(list):
    """The part of a backend that is hashed."""

    config, _added_rewards = EnvConfig(id="rows"), ()
    _row = list.__getitem__
    content_hash = EnvironmentBackend.content_hash


def hash_of(*rows, rewards=()):
    backend = Rows(rows)
    backend._added_rewards = rewards
    return backend.content_hash()


@dataclass
class Task:
    value: int = 1


ROW = {
    "question": "half a surrogate \udce9", "answer": 2**80, "score": float("nan"), 3: None, (1, 2): "skipped",
    "info": {"tags": {"a", "b", "c"}, "day": date(2026, 1, 2), "price": Decimal("1.5"), "path": Path("a")},
    "image": Image.new("RGB", (2, 2)), "array": np.arange(3), "raw": b"\xff", "config": EnvConfig(id="x"),
    "task": Task(), "object": object(), "function": len,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"question": "other"}, {"answer": 2**80 + 1}, {"score": 1.0}, {"info": {"tags": {"a", "b"}}}, {"raw": b"\xfe"},
        {"image": Image.new("RGB", (2, 2), "red")}, {"array": np.arange(1, 4)}, {"config": EnvConfig(id="y")},
        {"another": "column"}, {"task": Task(2)}, {"object": Task()},
    ],
)  # fmt: skip
def test_content_hash_changes_with_any_value(change):
    assert hash_of(ROW, ROW) == hash_of(ROW, dict(ROW))
    assert hash_of(ROW, ROW | change) != hash_of(ROW, ROW)


def test_content_hash_changes_with_order_and_number():
    a, b = {"question": "a"}, {"question": "b"}
    assert len({hash_of(a, b), hash_of(b, a), hash_of(a), hash_of(a, b, b)}) == 4


@pytest.mark.extended
def test_content_hash_is_the_same_in_another_process():
    code = "from tests.unit.rollouts.test_content_hash import ROW, hash_of; print(hash_of(ROW))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {hash_of(ROW)}


def test_content_hash_of_many_examples_is_bounded(monkeypatch):
    monkeypatch.setattr(environment_backend, "_MAX_HASHED_ROWS", 50)
    read = []

    class Counted(Rows):
        def _row(self, example):
            read.append(example)
            return self[example]

    rows = [{"question": str(i)} for i in range(1000)]
    Counted(rows).content_hash()
    assert len(read) == 50 and max(read) > 500
    monkeypatch.setattr(environment_backend, "_MAX_HASHED_BYTES", 100)
    read.clear()
    Counted(rows).content_hash()
    assert len(read) < 10


def test_content_hash_includes_the_file_of_added_rewards(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "graders_of_this_test.py"
    file.write_text("def grade(text):\n    return 1.0\n")
    from graders_of_this_test import grade

    before = hash_of(ROW, rewards=[(grade, 1.0)])
    assert before != hash_of(ROW)
    file.write_text("def grade(text):\n    return 0.0\n")
    assert hash_of(ROW, rewards=[(grade, 1.0)]) != before
    assert hash_of(ROW, rewards=[(publish_version, 1.0)]) != before
