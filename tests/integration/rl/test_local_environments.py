"""Environments without packaging learn: a file of the working directory, and a CSV file without Python code."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.rollouts.environment_id import FoundEnvironment, identify
from prime_rl.storage.artifact import MANIFEST
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
    values = rl_values(folder / "run", inference=own_server(), max_steps=15, async_level=1, ckpt={"interval": 10})
    values["orchestrator"] = {"batch_size": 64, "rollouts_per_example": 8, "sampling": {"max_tokens": 8}}
    run = start("rl", values, folder / "run", "--orchestrator.env.id", "my_env")
    assert run.end() == 0, run.story()
    rewards = [line["reward/mean"] for line in metrics_of(run.paths, "orchestrator")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
    identity = str(identify(FoundEnvironment("my_env", folder / "my_env.py", folder)))
    assert RLConfig.load(["@", str(run.paths.run_toml)]).orchestrator.identities == {"my_env": identity}
    samples = [json.loads(line) for line in run.paths.samples(14).read_text().splitlines()]
    assert {sample["identity"] for sample in samples} == {identity}
    part = json.loads((run.paths.checkpoints_dir / "step_10/orchestrator" / MANIFEST).read_text())
    assert part["settings"]["environment my_env.identity"] == identity


SELF_PLAY = """
import verifiers.v1 as vf

__all__ = ["LettersEnv", "LettersTaskset"]


class LettersTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    def load(self):
        words = ("tree", "leaf", "seed", "root")
        return [LettersTask(vf.TaskData(idx=i, prompt=word), self.config.task) for i, word in enumerate(words)]


class LettersConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class LettersEnv(vf.Env[LettersConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)

    async def finalize(self, task, episode):
        share = [trace.last_reply.count("e") / max(len(trace.last_reply), 1) for trace in episode.traces]
        for index, trace in enumerate(episode.traces):
            trace.record_reward("lead", share[index] - share[1 - index])
            trace.record_metric("share", share[index])
"""


def test_two_agents_that_play_each_other_learn(
    start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rewards always add up to 0, so only the advantages of each agent teach anything."""
    (tmp_path / "letters.py").write_text(SELF_PLAY)
    monkeypatch.chdir(tmp_path)
    values = rl_values(tmp_path / "run", inference=own_server(), max_steps=15, async_level=1)
    values["orchestrator"] = {"batch_size": 32, "rollouts_per_example": 8, "sampling": {"max_tokens": 8}}
    run = start("rl", values, tmp_path / "run", "--orchestrator.env.id", "letters")
    assert run.end() == 0, run.story()
    lines = metrics_of(run.paths, "orchestrator")
    assert max(abs(line["reward/mean"]) for line in lines) < 1e-6
    for agent in ("first", "second"):
        shares = [line[f"metrics/{agent}/share"] for line in lines]
        assert np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.2, (agent, shares)


@pytest.mark.release
def test_csv_file_of_fifty_questions_learns(
    start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed model reverses words; these are short enough to be exactly right now and then."""
    words = ["".join(letters) for letters in product("aeo", "nst", "rmlpdb")][:50]
    (tmp_path / "words.csv").write_text("word,backwards\n" + "".join(f"{word},{word[::-1]}\n" for word in words))
    monkeypatch.chdir(tmp_path)
    trainer = {"optim": {"lr": 4e-4}, "num_minibatches": 2, "model": {"seq_len": 2048}}
    values = rl_values(tmp_path / "run", inference=own_server(), max_steps=25, async_level=1, trainer=trainer)
    values["orchestrator"] = {"batch_size": 400, "rollouts_per_example": 8, "sampling": {"max_tokens": 8}}
    args = {"data_path": "words.csv", "question_column": "word", "answer_column": "backwards"}
    values["orchestrator"]["env"] = [{"id": "dataset", "args": args}]
    run = start("rl", values, tmp_path / "run")
    assert run.end() == 0, run.story()
    rewards = [line["reward/mean"] for line in metrics_of(run.paths, "orchestrator")]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15, rewards
