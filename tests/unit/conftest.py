import textwrap

import pytest
import pytest_asyncio

from tests.support.nursery import forked_worker_launchers
from tests.support.tiny_model import make_tokenizer
from tests.support.worker_launcher import launcher_with

TOY = '''
import asyncio
import itertools
from pathlib import Path

import verifiers as vf
from datasets import Dataset

def load_environment(
    examples=12, fail=None, prompt="say it", turns=1, spread=False, down=None, stuck=(), bad=(), eval_examples=0,
    flaky=(), slow=(),
):
    """Reward: by example, and by rollout with `spread`; `fail` raises in the environment or the reward.

    While there is a file `down`, a dependency cannot be reached; the examples of `stuck` never end, those of `bad` fail
    when they are scored, and the scoring of those of `slow` never ends. The first rollout of each example of `flaky`
    loses its sandbox after a turn.
    """
    played, lost = itertools.count(), set(flaky)
    rows = [{"question": f"{prompt} {i}", "answer": str(i)} for i in range(examples)]

    async def reward(completion, answer, **kwargs):
        if int(answer) in slow:
            await asyncio.Event().wait()
        if fail == "nan":
            return float("nan")
        if int(answer) in bad:
            raise KeyError("broken reward")
        return float(answer) / examples + (next(played) % 2 if spread else 0)

    class Toy(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            if fail == "raise":
                raise KeyError("broken environment")
            if int(state["answer"]) in lost:
                lost.remove(int(state["answer"]))
                raise vf.SandboxError("the sandbox is gone")
            return [{"role": "user", "content": "again"}]

        async def setup_state(self, state, **kwargs):
            if fail == "setup":
                raise KeyError("broken environment")
            if down is not None and Path(down).exists():
                raise ConnectionError("the tool server is down")
            if int(state["answer"]) in stuck:
                await asyncio.Event().wait()
            return state

    held_out = Dataset.from_list(rows[:eval_examples]) if eval_examples else None
    rubric = vf.Rubric(funcs=[reward])
    return Toy(dataset=Dataset.from_list(rows), eval_dataset=held_out, rubric=rubric, max_turns=turns)
'''


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A directory of installed environments."""
    path = tmp_path_factory.mktemp("packages")
    (path / "toy_environment.py").write_text(textwrap.dedent(TOY))
    return path


@pytest.fixture(scope="session", autouse=True)
def forked_workers():
    """Fork servers of workers are forked as well: importing verifiers takes seconds."""
    with forked_worker_launchers():
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def host(packages):
    """One fork server for all tests."""
    async with launcher_with(packages) as host:
        yield host


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return path
