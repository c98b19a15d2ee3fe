import sys
import textwrap

import pytest

from tests.support.tiny_model import make_tokenizer

TOY = '''
import verifiers as vf
from datasets import Dataset

def load_environment(examples=12, fail=None, prompt="say it", turns=1):
    """Reward: how many tokens the answer has, by example; `fail` raises in the environment or the reward."""
    rows = [{"question": f"{prompt} {i}", "answer": str(i)} for i in range(examples)]

    def reward(completion, answer, **kwargs):
        if fail == "nan":
            return float("nan")
        return float(answer) / examples

    class Toy(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            if fail == "raise":
                raise KeyError("broken environment")
            return [{"role": "user", "content": "again"}]

        async def setup_state(self, state, **kwargs):
            if fail == "setup":
                raise KeyError("broken environment")
            return state

    return Toy(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]), max_turns=turns)
'''


@pytest.fixture
def toy_environment(tmp_path, monkeypatch):
    """An installed environment `toy_environment`."""
    package = tmp_path / "packages"
    package.mkdir()
    (package / "toy_environment.py").write_text(textwrap.dedent(TOY))
    monkeypatch.syspath_prepend(str(package))
    yield "toy_environment"
    sys.modules.pop("toy_environment", None)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return path
