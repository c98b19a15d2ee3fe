"""What tests of environments share: engines, classic environments, and pools with every kind of trouble."""

import asyncio
import importlib.machinery
import os
import sys
import textwrap
import types
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from prime_rl.configs.environment import EnvConfig
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceServerLost
from prime_rl.rollouts.rendering.messages import Generation
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import environment_pool, worker_main
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess
from tests.support.fake_engine import fake_engine
from tests.support.tiny_model import make_tokenizer
from tests.support.worker_launcher import launcher_with

PACKAGES = Path(__file__).parents[2] / "support/packages"
TOKENIZER = make_tokenizer()
QUESTIONS = "question,answer,level\nWhat is 2 + 3?,5,easy\nWhat is 4 + 4?,8,hard\n"
RUN = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 20}

TROUBLED = '''
"""Example i is rewarded i / 8, unless it is a bad one: those do what `trouble` says when they are scored."""

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import verifiers as vf
from datasets import Dataset

class Custom(BaseException):
    pass


KEPT = []
BASE = {"base": Custom, "base interrupt": KeyboardInterrupt, "base cancelled": asyncio.CancelledError,
        "base exit": SystemExit}
VALUES = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "huge": 1e30, "list": [1.0]}


def load_environment(trouble=None, bad=(0,), turns=1, marker=None, examples=8, troubles=None, cleanup_seconds=0.0):
    """`troubles` has one trouble for each example instead."""
    math = vf.MathRubric() if "executors" in (troubles or ()) else None
    if troubles:
        bad, examples = range(len(troubles)), len(troubles)

    def trouble_of(answer):
        return troubles[int(answer)] if troubles else trouble

    if trouble == "load":
        raise ValueError("cannot\\nload this")
    if trouble == "exit while loading":
        os._exit(3)
    if trouble == "load once":
        if Path(marker).exists():
            raise ValueError("the data set is gone")
        Path(marker).touch()
    if trouble == "grow":
        examples = 9 if Path(marker).exists() else 8
        Path(marker).touch()

    async def leave():
        sys.exit(4)

    def open_files():
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    async def reward(answer, **kwargs):
        trouble = trouble_of(answer)
        if int(answer) not in bad or trouble is None:
            return int(answer) / 8
        if trouble in VALUES:
            return VALUES[trouble]
        if trouble == "step reward":
            kwargs["state"]["trajectory"][0]["reward"] = 5.0
        if trouble == "executors":
            barrier = threading.Barrier(40)
            await asyncio.gather(*(asyncio.to_thread(barrier.wait, 60) for _ in range(40)))
            return math.executor._max_workers
        if trouble == "raise":
            raise KeyError("broken reward")
        if trouble == "interrupt":
            raise KeyboardInterrupt("broken reward")
        if trouble == "cancelled":
            raise asyncio.CancelledError("broken reward")
        if trouble == "leak":
            KEPT.append(b"x" * 2**28)
        if trouble == "block":
            threading.Event().wait()
        if trouble == "exit":
            os._exit(7)
        if trouble == "leave a child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(marker).write_text(str(child.pid))
            os._exit(7)
        if trouble == "sys.exit":
            sys.exit(4)
        if trouble == "exit in a task":
            await asyncio.gather(leave())
        if trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while trouble in ("wait", "wait stubbornly"):
            if marker is not None:
                Path(marker).write_text("waiting")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if marker is not None:
                    Path(marker).write_text("cancelled")
                if trouble == "wait":
                    raise
        return int(answer) / 8

    def worker(state):
        return os.getpid()

    class Troubled(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            if trouble_of(state["answer"]) == "turn":
                raise vf.ToolCallError("no such tool") from ZeroDivisionError("division by zero")
            return [vf.UserMessage(content="again")]

        async def setup_state(self, state, **kwargs):
            trouble = trouble_of(state["answer"])
            if trouble == "setup":
                raise KeyError("broken environment")
            if trouble == "sampling":
                state["sampling_args"] = {"temperature": 0.1}
            if trouble in BASE and int(state["answer"]) in bad:
                raise BASE[trouble]("broken environment")
            return state

        @vf.cleanup
        async def release(self, state):
            if trouble_of(state["answer"]) == "exit in cleanup" and int(state["answer"]) in bad:
                sys.exit(5)

    class Cleaning(vf.Rubric):
        @vf.cleanup
        async def release(self, state):
            if cleanup_seconds:
                await asyncio.sleep(cleanup_seconds)
                Path(marker).write_text("cleaned")

    rows = [{"question": f"say it {i}", "answer": str(i)} for i in range(examples)]
    if trouble == "unseeded":
        random.SystemRandom().shuffle(rows)
    rubric = Cleaning(funcs=[reward, worker, open_files], weights=[1.0, 0.0, 0.0])
    return Troubled(dataset=Dataset.from_list(rows) if rows else Dataset.from_dict({"question": [], "answer": []}),
                    rubric=rubric, max_turns=turns)
'''


def encode(text):
    """The tokens of a complete reply."""
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def generation(ids, logprob=-0.5, version=0, is_truncated=False):
    n = len(ids)
    return Generation(
        np.array(ids, np.int32), np.full(n, logprob, np.float32), np.full(n, version, np.int32), is_truncated
    )


class NumberingEngine:
    """Answers call n with "answer n", or as `says` of the prompt; keeps what it is asked for.

    Attributes:
        cut: the calls whose answers are truncated.
        lost_after: the number of calls after which the server is lost.
    """

    def __init__(self, cut=(), says=None, lost_after=None):
        self.asked, self.cut, self.says, self.lost_after = [], cut, says, lost_after

    async def generate(self, prompt_ids, sampling):
        number = len(self.asked)
        self.asked.append(sampling)
        await asyncio.sleep(0)
        if self.lost_after is not None and number >= self.lost_after:
            raise InferenceServerLost("inference is gone")
        said = f"answer {number}" if self.says is None else self.says(TOKENIZER.decode(prompt_ids))
        return generation(encode(said), is_truncated=number in self.cut)


@asynccontextmanager
async def ending_server(environment):
    """End the server that a v1 environment starts for its agents."""
    try:
        yield
    finally:
        if task := getattr(getattr(environment, "_adapter", None), "_server_task", None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def served(environment, reply=None):
    """Yield a fake engine and a client of it; end the server of the environment afterwards."""
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine, ending_server(environment):
        fake.reply = reply
        yield fake, engine


@pytest.fixture
def installed(monkeypatch):
    """Make the environments of tests/support/packages importable, also in other processes."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="session")
def renderer():
    return Renderer(TOKENIZER)


@pytest.fixture
def load_classic(monkeypatch, renderer):
    """Install an environment object and load it; its warnings are in `load_classic.warnings`."""

    def loaded(env, keep_messages=False, split="train", **config):
        module = types.ModuleType("environment_of_a_test")
        module.load_environment = lambda: env
        module.__spec__ = importlib.machinery.ModuleSpec("environment_of_a_test", None, origin=__file__)
        monkeypatch.setitem(sys.modules, "environment_of_a_test", module)
        config = EnvConfig(id="environment-of-a-test", **config)
        return worker_main.load(config, renderer, split, keep_messages, loaded.warnings.append)

    loaded.warnings = []
    return loaded


@pytest.fixture
def play_classic(load_classic):
    """Run a group of an environment object; the engine and the warnings are attributes."""

    async def played(
        env, count=1, example=0, seq_len=400, sampling=RUN, keep_messages=False, account=None,
        cut=(), says=None, lost_after=None, **config,
    ):  # fmt: skip
        played.engine, played.warnings = NumberingEngine(cut, says, lost_after), load_classic.warnings
        environment = load_classic(env, keep_messages, **config)
        return await environment.run_group(example, count, played.engine, sampling, seq_len, account=account)

    return played


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A directory of installed environments."""
    path = tmp_path_factory.mktemp("packages")
    (path / "troubled_environment.py").write_text(textwrap.dedent(TROUBLED))
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def host(packages):
    async with launcher_with(packages) as host:
        yield host


@pytest.fixture
def open_pool(host, tokenizer_dir, tmp_path, monkeypatch):
    """Context manager: a pool that plays `troubled_environment`, or another one of `packages`."""

    @asynccontextmanager
    async def opened(
        workers=1,
        timeout=None,
        grace_seconds=1.0,
        retries=2,
        check_seq_len=None,
        access=None,
        name="troubled_environment",
        config=None,
        timeline=None,
        split="train",
        warn=lambda kind, env, text: None,
        **args,
    ):
        monkeypatch.setattr(environment_pool, "_MAX_RETRIES", retries)
        limits = {"timeout_seconds": timeout, "cleanup_seconds": grace_seconds, "start_timeout_seconds": 120}
        pool = EnvironmentPool(
            EnvConfig(id=name, args=args, **limits | (config or {})),
            host,
            access or ModelAccess("m", str(tokenizer_dir)),
            split=split,
            warn=warn,
            workers=workers,
            check_seq_len=check_seq_len,
            log=lambda name: tmp_path / f"{name}.log",
            timeline=timeline,
        )
        async with pool:
            yield pool

    return opened
