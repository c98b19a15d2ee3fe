"""`prime_rl.Run`: a whole run from Python, as `async with` or `with`."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

from prime_rl.api.active_run import POLL_SECONDS, ActiveRun
from prime_rl.api.policy_client import Messages
from prime_rl.api.run_arguments import Environment, Values, load_run_config
from prime_rl.api.steps import Step
from prime_rl.configs.rl import RLConfig


class Run:
    """A run of `rl`: same keys, errors, files and processes. The block of `with` starts and ends it.

    `async with Run(...) as run` gives this object, whose iteration, `evaluate`, `chat` and `wait` are awaited.
    `with Run(...) as run` gives an `ActiveRun`, which has the same methods without `await` and needs no event loop, so
    it also works where one runs, as in a notebook.

    When the block ends, by `break`, an exception or its last line, all processes of the run are ended. They also end
    when the calling program is killed. After the last step, inference serves until then.

    Args:
        model: Hugging Face id or directory; None leaves it to `config`.
        env: an environment or a list: id, dict of keys, function that loads one, or a loaded one.
        reward: reward functions, added to each environment of `env` with weight 1.
        agent: a coroutine function that is the agent of each environment of `env`; see `env.agent`.
        advantage: a function of the groups of a batch, as `orchestrator.advantage.import_path` names one.
        loss: a loss, as `trainer.loss.import_path` names one.
        config: keys of `rl` (nested, or with dots), or a TOML file of them.
        resume: the checkpoint to continue from, -1 for the newest; None starts a new run.
        overrides: further keys of `rl`, which override those of `config`.

    Raises:
        ConfigError: bad input, as for `rl`; or a function cannot be sent to other processes.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        env: Environment | Sequence[Environment] | None = None,
        *,
        reward: Callable[..., float] | Sequence[Callable[..., float]] = (),
        agent: Callable[..., Awaitable[Any]] | None = None,
        advantage: Callable[..., Any] | None = None,
        loss: Callable[..., Any] | None = None,
        config: Values | str | os.PathLike[str] | None = None,
        resume: int | None = None,
        **overrides: Any,
    ) -> None:
        if resume is not None:
            overrides["ckpt.resume_step"] = resume
        functions = {"orchestrator.advantage": advantage, "trainer.loss": loss}
        self.config: RLConfig = load_run_config(model, env, reward, agent, functions, config, overrides)
        self._active: ActiveRun | None = None

    def __enter__(self) -> ActiveRun:
        self._active = ActiveRun(self.config)
        return self._active

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._end(raise_errors=kind is None)

    async def __aenter__(self) -> Self:
        start = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            await asyncio.shield(start)
        except asyncio.CancelledError:  # then nothing calls __aexit__
            await asyncio.wait([start])
            if start.exception() is None:
                await asyncio.to_thread(start.result().stop)
            raise
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await asyncio.shield(asyncio.to_thread(self._end, kind is None))

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Yield the trained steps in order, from where the last loop ended. Raises as `ActiveRun.__iter__`."""
        while (step := self._run.poll()) is not None or not self._run.is_over:
            if step is not None:
                yield step
            else:
                await asyncio.sleep(POLL_SECONDS)

    @property
    def base_url(self) -> str:
        """See `ActiveRun.base_url`."""
        return self._run.base_url

    async def wait(self) -> Step | None:
        """See `ActiveRun.wait`."""
        last = None
        async for step in self:
            last = step
        return last

    async def evaluate(
        self,
        split: str | None = None,
        k: int = 1,
        env: Environment | Sequence[Environment] | None = None,
        **overrides: Any,
    ) -> dict[str, Any]:
        """See `ActiveRun.evaluate`."""
        return await asyncio.to_thread(self._run.evaluate, split, k, env, **overrides)

    async def chat(self, messages: Messages, **sampling: Any) -> str:
        """See `ActiveRun.chat`."""
        return await asyncio.to_thread(self._run.chat, messages, **sampling)

    def export(self, path: str | Path, step: int = -1) -> Path:
        """See `ActiveRun.export`."""
        return self._run.export(path, step)

    def page(self, port: int = 0) -> str:
        """See `ActiveRun.page`."""
        return self._run.page(port)

    @property
    def _run(self) -> ActiveRun:
        if self._active is None:
            raise RuntimeError("the run has not started; use `with Run(...) as run` or `async with Run(...) as run`")
        return self._active

    def _end(self, raise_errors: bool) -> None:
        try:
            if raise_errors:
                self._run.check()
        finally:
            self._run.stop()
