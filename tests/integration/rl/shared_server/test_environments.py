"""Conversations, tools and v1 tasksets in one run of the real processes."""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.rl.conftest import StartCommand, of_server, rl_values
from tests.support.command import metrics_of
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[4]
STEPS = 3
ENVIRONMENTS = ["alphabet_sort", "calculator", "talking_taskset", "two_agents"]


def test_run_with_every_kind_of_environment_agrees_with_the_sampler(
    server: Server, start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multi-turn, tools, and v1; the trainer agrees with the sampler on every token of every turn (I6).

    Each environment has different truncation settings, one has none.
    """
    packages = [str(ROOT / "tests/support/packages"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, packages)))
    orchestrator = {
        "client": of_server(server),
        "batch_size": 32,
        "rollouts_per_example": 4,
        "sampling": {"max_tokens": 32, "temperature": 1.0, "top_k": 50},
        "rendering": {"chat_template": str(ROOT / "configs/chat_templates/tools.jinja")},
        "env": [
            {"id": "alphabet_sort", "args": {"min_turns": 3, "max_turns": 3, "max_names_per_turn": 2}},
            {"id": "calculator", "args": {"difficulty": "easy"}, "sampling": {"top_k": -1}},
            {"id": "talking_taskset", "args": {"task": {"per_letter": 0.1}}, "sampling": {"top_p": 0.9, "min_p": 0.01}},
            {
                "id": "talking_taskset",
                "name": "two_agents",
                "args": {"task": {"per_letter": 0.1}, "env": {"train_both": True}},
            },
        ],
    }
    values = rl_values(
        tmp_path / "run",
        max_steps=STEPS,
        async_level=0,
        seq_len=2048,
        orchestrator=orchestrator,
        trainer={"optim": {"lr": 1e-3}, "keep_batches": True},
    )
    run = start("rl", values, tmp_path / "run")
    assert run.end() == 0, run.story()
    server.reload()

    trained = metrics_of(run.paths, "trainer")
    assert len(trained) == STEPS
    for line in trained:
        assert 0 <= line["mismatch_kl/on_policy"] < 1e-4
        assert line["mismatch_logprob/on_policy"] < 1e-4
        assert line["sampling_mask/outside_trainer_mask"] < 1e-3
    # All rollouts of a group can have the same reward, also because the learning rate is absurd.
    assert any(line["grad_norm"] > 0 for line in trained)
    report = [json.loads(line) for step in range(STEPS) for line in run.paths.samples(step).read_text().splitlines()]
    assert {rollout["env"] for rollout in report} == set(ENVIRONMENTS)
    for rollout in report:
        names = sorted(credit["name"] for credit in rollout.get("credits", ()))
        assert names == (["agent", "other"] if rollout["env"] == "two_agents" else [])
    batches = [load_file(run.paths.rollouts(step) / "rows.safetensors") for step in range(STEPS)]
    # Three turns in one sample, what lies between them masked.
    assert max(stretch for rows in batches for stretch in sampled_stretches(rows)) == 3
    rows = batches[-1]
    assert set(rows["top_k"].tolist()) == {0, 50}
    assert set(rows["top_p"].tolist()) == {1.0, float(np.float32(0.9))}


def sampled_stretches(rows: dict[str, np.ndarray]) -> list[int]:
    """How many stretches of sampled tokens each sample has: its turns."""
    starts = np.concatenate([[0], np.cumsum(rows["seq_lens"])])
    masks = [rows["loss_mask"][start:end] for start, end in pairwise(starts)]
    return [int((np.diff(mask.astype(int), prepend=0) == 1).sum()) for mask in masks]
