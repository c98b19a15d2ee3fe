"""I9: however the ranks divide the work, loss, gradients and published weights are those of one rank (gloo, fp32)."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run.assign import PADDING_ROW, assign_rows
from prime_rl.trainer.engine import Counts, Engine, Minibatch, Objective
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.micro_batch import make_micro_batch, masked_row
from prime_rl.trainer.model import load_tokenizer
from prime_rl.trainer.parallel import Layout, World, join_world
from prime_rl.trainer.publish import Publisher
from prime_rl.types import PolicyVersion
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.unit.trainer.world import run_world

# name -> (ranks, model keys)
LAYOUTS = {
    "shard": (2, {}),
    "replicate": (2, {"dp_replicate": 2}),
    "cp": (2, {"cp": {"degree": 2}}),
    "replicate_shard": (4, {"dp_replicate": 2}),
    "replicate_cp": (4, {"dp_replicate": 2, "cp": {"degree": 2}}),
    "cp_shard": (4, {"cp": {"degree": 2}}),
    "cp_all": (4, {"cp": {"degree": 4}}),  # more ranks than key-value heads
}
LENGTHS = [(23, 9, 2), (31,), (5, 4, 3, 17), (2,), (11, 13)]  # rows of odd lengths, one with nothing but two tokens


def make_rows(step):
    random = np.random.default_rng(step)
    rows = []
    for lengths in LENGTHS:
        total = sum(lengths)
        mask = np.concatenate([np.arange(n) >= max(1, n // 2) for n in lengths])
        rows.append(
            make_micro_batch(
                random.integers(0, VOCAB_SIZE, total),
                mask,
                lengths,
                logprobs=random.normal(-4.8, 0.3, total),
                advantages=np.repeat(random.standard_normal(len(lengths)), lengths),
                temperature=np.repeat(random.uniform(0.5, 1.5, len(lengths)), lengths),
            )
        )
    return rows


def share(rows, world):
    dealt = assign_rows([float(len(row.tokens)) for row in rows], world.data_size)[world.data_rank]
    tokens = int(sum(row.loss_mask.sum() for row in rows))
    return Minibatch([masked_row() if i == PADDING_ROW else rows[i] for i in dealt], Counts(tokens))


def sequence_objective(scored):
    """A loss that is not a sum over tokens: it must see whole sequences."""
    row = scored.row
    zeros = torch.zeros(int(row.segment_ids[-1]) + 1)
    count = zeros.index_add(0, row.segment_ids, row.loss_mask.float()).clamp(min=1)
    difference = torch.where(row.loss_mask, scored.logprobs - row.sampler_logprobs, 0.0)
    ratio = (zeros.index_add(0, row.segment_ids, difference) / count).clamp(-2, 2).exp()
    loss = -torch.where(row.loss_mask, ratio[row.segment_ids] * row.advantages, 0.0).sum()
    means = {"entropy": (scored.entropy.sum(), row.loss_mask.sum())}
    return Objective(loss / scored.counts.tokens, means)


class Recorder(torch.optim.AdamW):
    """Keeps the gradients of the first step, whole."""

    gradients = None

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.gradients is None:
            self.gradients = [p.grad.full_tensor().clone() for p in parameters]
        return super().step(closure)


def train(world, source, keys, max_norm=1.0):
    config = TrainerModelConfig(name=str(source), **keys)
    policy = make_policy(config, 0, world)
    optimizer = Recorder(policy.parameters(), lr=1e-3, foreach=False)
    engine = Engine(policy, optimizer, world, max_norm)
    return policy, optimizer, engine


def run_layouts(world, argument):
    """Runs on every rank: three steps under every layout of so many ranks."""
    root, results = Path(argument["root"]), {}
    for name, (source, keys) in argument["layouts"].items():
        world = dataclasses.replace(world, sharers=keys.get("cp", {}).get("degree", 1) * keys.get("tp", 1))
        config = TrainerModelConfig(name=str(root / source), **keys)
        policy, optimizer, engine = train(world, root / source, keys)
        steps = [engine.step([share(make_rows(n), world)], sequence_objective, 1.0) for n in range(3)]
        results[name] = [dataclasses.asdict(step) for step in steps]
        if world.leads:
            names = [n for n, _ in policy.causal_lm.named_parameters()]
            save_file(dict(zip(names, optimizer.gradients, strict=True)), root / f"gradients_{name}.safetensors")
        tokenizer = load_tokenizer(_no_tokenizer(), config)
        Publisher(policy, tokenizer, torch.float32, world).publish(root / f"out_{name}", PolicyVersion(0, 3))
    return results


def _no_tokenizer():
    from prime_rl.configs.shared import TokenizerConfig

    return TokenizerConfig()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    make_models(root)
    results = {}
    for size in (1, 2, 4):
        chosen = {f"{source}-alone": (source, {}) for source in MODELS} if size == 1 else {}
        for name, (ranks, keys) in LAYOUTS.items():
            if ranks == size:
                chosen |= {f"{source}-{name}": (source, keys) for source in suited(keys)}
        answers = run_world(size, run_layouts, {"root": str(root), "layouts": chosen}, root)
        assert all(answer == answers[0] for answer in answers), "the ranks disagree"
        results |= answers[0]
    return root, results


MODELS = ("dense", "sliding")


def suited(keys):
    return MODELS if "cp" in keys else MODELS[:1]


def make_models(root):
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(root / "dense")
    make_tiny_model(root / "sliding", tie_word_embeddings=False)
    config = AutoConfig.from_pretrained(root / "sliding")
    config.use_sliding_window, config.sliding_window = True, 5
    config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "sliding")


CASES = [f"{source}-{name}" for name, (_, keys) in LAYOUTS.items() for source in suited(keys)]


@pytest.mark.parametrize("case", CASES)
def test_layout_is_invisible(worlds, case):
    """I9: loss, gradient norm and every gradient of the first step, loss and norm of three, and what is published."""
    root, results = worlds
    alone = f"{case.split('-')[0]}-alone"
    for wanted, got in zip(results[alone], results[case], strict=True):
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-5)
        assert got["means"] == pytest.approx(wanted["means"], rel=1e-5)
        assert got["skipped"] == 0
    wanted, got = (load_file(root / f"gradients_{name}.safetensors") for name in (alone, case))
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    wanted, got = (load_file(root / f"out_{name}" / "model.safetensors") for name in (alone, case))
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-4)
