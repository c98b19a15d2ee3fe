"""The recipe configs/mixture/cpu.toml: every environment contributes to the batches of a few steps."""

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.rl.conftest import StartCommand, own_server
from tests.support.command import metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
STEPS = 4


def test_every_environment_of_the_mixture_contributes(start: StartCommand, tmp_path: Path) -> None:
    values = tomllib.loads((ROOT / "configs/mixture/cpu.toml").read_text())
    values["model"]["name"] = str(ROOT / values["model"]["name"])
    values |= {"max_steps": STEPS, "inference": own_server(), "output_dir": str(tmp_path / "run")}
    run = start("rl", values, tmp_path / "run")
    assert run.end(800) == 0, run.story()

    weights = {env["id"]: env["weight"] for env in values["orchestrator"]["env"]}
    rollouts = [json.loads(line) for step in range(STEPS) for line in run.paths.samples(step).read_text().splitlines()]
    counts = Counter(rollout["env"] for rollout in rollouts)
    assert counts.keys() == weights.keys()
    for env in weights:
        rewards = {rollout["reward"] for rollout in rollouts if rollout["env"] == env}
        assert len(rewards) > 1, (env, rewards)
        assert any(rollout["advantage"] for rollout in rollouts if rollout["env"] == env)
    assert counts["logic"] > counts["science"]
    steps = metrics_of(run.paths, "orchestrator")
    for line in steps:
        shares = [line.get(f"env/{env}/batch_share", 0) for env in weights]
        assert sum(shares) == pytest.approx(1), line["step"]
    assert max(line["staleness/max"] for line in steps) <= values["async_level"]
