"""One fork server for all tests of the pool, and an environment that makes every kind of trouble."""

import asyncio
import textwrap
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from prime_rl.configs.environment import EnvConfig
from prime_rl.rollouts.workers import environment_pool
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess
from tests.support.worker_launcher import launcher_with

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


def load_environment(trouble=None, bad=(0,), turns=1, marker=None, examples=8, troubles=None):
    """`troubles` has one trouble for each example instead."""
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
        if trouble == "exit" or (trouble == "exit once" and not Path(marker).exists()):
            if marker is not None:
                Path(marker).touch()
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

    def metric(answer):
        return VALUES["nan"] if trouble == "metric" and int(answer) in bad else 0

    class Troubled(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            if trouble_of(state["answer"]) == "turn":
                raise vf.ToolCallError("no such tool") from ZeroDivisionError("division by zero")
            return [vf.UserMessage(content="again")]

        async def setup_state(self, state, **kwargs):
            trouble = trouble_of(state["answer"])
            if trouble == "setup":
                raise KeyError("broken environment")
            if trouble in BASE and int(state["answer"]) in bad:
                raise BASE[trouble]("broken environment")
            return state

        @vf.cleanup
        async def release(self, state):
            if trouble_of(state["answer"]) == "exit in cleanup" and int(state["answer"]) in bad:
                sys.exit(5)

    rows = [{"question": f"say it {i}", "answer": str(i)} for i in range(examples)]
    if trouble == "unseeded":
        random.SystemRandom().shuffle(rows)
    rubric = vf.Rubric(funcs=[reward, worker, metric, open_files], weights=[1.0, 0.0, 0.0, 0.0])
    return Troubled(dataset=Dataset.from_list(rows) if rows else Dataset.from_dict({"question": [], "answer": []}),
                    rubric=rubric, max_turns=turns)
'''

PECULIAR = '''
"""An environment that does one peculiar thing."""

import asyncio
import threading
from pathlib import Path

import verifiers as vf
from datasets import Dataset

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def load_environment(does=None, marker=None, cleanup_seconds=0.0):
    async def reward(completion):
        if does == "surrogate error":
            raise FileNotFoundError("no file caf\\udce9.txt")
        if does == "cleanup":
            Path(marker).write_text("waiting")
            await asyncio.Event().wait()
        return 1.0

    math = vf.MathRubric() if does == "executors" else None

    async def threads(state):
        if math is None:
            return 0
        barrier = threading.Barrier(40)
        await asyncio.gather(*(asyncio.to_thread(barrier.wait, 60) for _ in range(40)))
        return 40

    def processes(state):
        return math.executor._max_workers if math is not None else 0

    class Cleaning(vf.Rubric):
        @vf.cleanup
        async def release(self, state):
            await asyncio.sleep(cleanup_seconds)
            if marker is not None:
                Path(marker).write_text("cleaned")

    class Peculiar(vf.MultiTurnEnv):
        async def setup_state(self, state):
            if does == "sampling":
                state["sampling_args"] = {"temperature": 0.1}

        async def env_response(self, messages, state, **kwargs):
            state["final_env_response"] = [vf.UserMessage(content="caf\\udce9" if does == "surrogates" else "enough")]
            return []

        async def add_trajectory_step(self, state, trajectory_step):
            if does in ("advantage", "huge advantage"):
                trajectory_step["advantage"] = 1.0 if does == "advantage" else 1e30
            await super().add_trajectory_step(state, trajectory_step)

    def named(state):
        return 2.0

    named.__name__ = "caf\\udce9" if does == "surrogates" else "named"
    content = [PICTURE] if does == "picture" else "say it"
    rows = [{"prompt": [{"role": "user", "content": "say it"}], "answer": ""}]
    rows += [{"prompt": [{"role": "user", "content": content}], "answer": ""}]
    data = rows if does == "picture" else Dataset.from_list(rows)
    rubric = Cleaning(funcs=[reward, named, threads, processes], weights=[1.0, 0.0, 0.0, 0.0])
    env = Peculiar(dataset=Dataset.from_list(rows[:1]) if does == "picture" else data, rubric=rubric, max_turns=2)
    if does == "picture":
        env.get_dataset = lambda *args, **kwargs: rows
    return env
'''


@asynccontextmanager
async def ending_server(environment):
    """End the server that a v1 environment starts for its agents."""
    try:
        yield
    finally:
        if task := getattr(getattr(environment, "_adapter", None), "_server_task", None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A directory of installed environments."""
    path = tmp_path_factory.mktemp("packages")
    (path / "troubled_environment.py").write_text(textwrap.dedent(TROUBLED))
    (path / "peculiar_environment.py").write_text(textwrap.dedent(PECULIAR))
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
