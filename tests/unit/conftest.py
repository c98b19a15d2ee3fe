import textwrap

import pytest
import pytest_asyncio

from tests.support.nursery import forked_worker_launchers
from tests.support.tiny_model import make_tokenizer
from tests.support.worker_launcher import launcher_with

TOY = """
import verifiers as vf
from datasets import Dataset

def load_environment(examples=12, turns=1, eval_examples=0):
    rows = [{"question": f"say it {i}", "answer": str(i)} for i in range(examples)]

    async def reward(completion, answer, **kwargs):
        return float(answer) / examples

    class Toy(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "again"}]

    held_out = Dataset.from_list(rows[:eval_examples]) if eval_examples else None
    rubric = vf.Rubric(funcs=[reward])
    return Toy(dataset=Dataset.from_list(rows), eval_dataset=held_out, rubric=rubric, max_turns=turns)
"""


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
