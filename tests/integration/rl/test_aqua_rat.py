"""The recipe configs/aqua_rat/cpu.toml: it trains, validates, writes checkpoints and resumes, without downloads."""

import tomllib
from pathlib import Path

import pytest

from prime_rl.storage.paths import steps_in
from tests.integration.rl.conftest import StartCommand, own_server
from tests.support.command import metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
VAL = "val/nanochat_aqua_rat"


def test_aqua_rat_recipe_learns_validates_and_resumes(start: StartCommand, tmp_path: Path) -> None:
    """The bound holds (I1); pass@k and the accuracy by letter rise."""
    values = tomllib.loads((ROOT / "configs/aqua_rat/cpu.toml").read_text())
    values["model"]["name"] = str(ROOT / values["model"]["name"])
    values |= {"inference": own_server(), "output_dir": str(tmp_path / "run")}
    steps = values["max_steps"]
    run = start("rl", values, tmp_path / "run")
    assert run.end(1200) == 0, run.story()

    lines = metrics_of(run.paths, "orchestrator")
    trained = [line for line in lines if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in trained]
    assert len(rewards) == steps
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert max(line["staleness/max"] for line in trained) <= values["async_level"]
    validated = [line for line in lines if f"{VAL}/pass@1" in line]
    first, last = validated[0], validated[-1]
    assert last[f"{VAL}/pass@1"] > first[f"{VAL}/pass@1"] + 0.1
    assert all(line[f"{VAL}/pass@1"] <= line[f"{VAL}/pass@8"] <= 1 for line in validated)
    by_letter = [last[f"{VAL}/by/answer/{letter}/pass@1"] for letter in "ABCDE"]
    assert sum(by_letter) / 5 > 0.6
    assert steps_in(run.paths.checkpoints_dir) == [steps // 2, steps]

    values["ckpt"] |= {"resume_step": steps // 2}
    values |= {"max_steps": steps // 2 + 2, "inference": own_server()}
    resumed = start("rl", values, tmp_path / "run")
    assert resumed.end(600) == 0, resumed.story()
    line = [line for line in metrics_of(run.paths, "orchestrator") if "reward/mean" in line][-1]
    assert line["step"] == steps // 2 + 1
    assert line["reward/mean"] > rewards[0]
