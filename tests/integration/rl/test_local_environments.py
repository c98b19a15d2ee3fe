"""An environment in a file of the working directory learns, without packaging."""

from pathlib import Path

import numpy as np
import pytest

from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

MY_ENV = """
import verifiers as vf
from datasets import Dataset


def share_of_e(completion) -> float:
    text = completion[-1]["content"]
    return text.count("e") / max(len(text), 1)


def load_environment(words=("tree", "leaf", "seed", "root")) -> vf.Environment:
    rows = [{"question": word, "answer": ""} for word in words]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[share_of_e]))
"""


def test_file_of_the_working_directory_learns(
    start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(MY_ENV.split("\n")) - 2 <= 15
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "my_env.py").write_text(MY_ENV)
    monkeypatch.chdir(folder)
    values = rl_values(folder / "run", inference=own_server(), max_steps=15, async_level=1)
    values["orchestrator"] = {"batch_size": 64, "rollouts_per_example": 8, "sampling": {"max_tokens": 8}}
    run = start("rl", values, folder / "run", "--orchestrator.env.id", "my_env")
    assert run.end() == 0, run.story()
    rewards = [line["reward/mean"] for line in metrics_of(run.paths, "orchestrator")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
