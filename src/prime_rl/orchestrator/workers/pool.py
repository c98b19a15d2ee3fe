"""One environment, played in worker processes: whatever its code does, the event loop of main goes on.

I2: every group ends with its rollouts or with an error that has a name. A worker that dies or hangs is replaced at
once, and its groups are played again: those that merely shared the process elsewhere and as often as it takes, the one
that brought it down in a process of its own, where it can harm nobody, until its attempts are used up.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from loguru import logger

from prime_rl.configs.playing import Api
from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.shared import EnvConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.workers.failures import EnvironmentFailed
from prime_rl.orchestrator.workers.host import WorkerHost
from prime_rl.orchestrator.workers.protocol import Load, Play
from prime_rl.orchestrator.workers.remote import Patience, RemoteWorker, WorkerDied
from prime_rl.types import Rollout

_LOOK_S = 0.5
_CLOSE_S = 5.0
_STARTS = 3
_ALONE = 2
"""Groups that are played in a process of their own at once."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How workers reach and write to the model; the same for all environments of a run.

    Attributes:
        model: name that the inference servers serve.
        tokenizer: directory or Hugging Face id.
        trust_remote_code: run code that the tokenizer brings along.
        rendering: between messages and tokens.
        trajectory_strategy: how the turns of a rollout become samples.
        api_key: sent to the servers as bearer token if given.
        request_timeout_s: longest time for one request, seconds.
        api: `generate` for our own servers; `chat` for any that speak OpenAI's protocol, which render the prompts
            themselves, so that rollouts have no samples.
        keep_messages: make every rollout a `Conversation`.
        vocabulary: token ids that the servers sample lie below it; None is not known.
    """

    model: str
    tokenizer: str
    trust_remote_code: bool = False
    rendering: RenderingConfig = field(default_factory=RenderingConfig)
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    api_key: str | None = field(default=None, repr=False)
    request_timeout_s: float = 1200
    api: Api = "generate"
    keep_messages: bool = False
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool puts up with.

    Attributes:
        retries: how often a group is played again after its worker died by its doing, or by nobody's known doing.
        start_s: longest time for a worker to load the environment, seconds.
        grace_s: time beyond `env.timeout` for a worker to end a group by itself, before it is killed, seconds.
        silence_s: longest time without a beat of a worker's event loop where `env.timeout` is unset, seconds.
    """

    retries: int = 2
    start_s: float = 600
    grace_s: float = 5
    silence_s: float = 600


class EnvironmentPool:
    """Plays the examples of one split of one environment.

    Attributes:
        name: of the environment, in metrics and messages.
        deaths: how many workers have died so far.
    """

    def __init__(
        self,
        config: EnvConfig,
        host: WorkerHost,
        access: ModelAccess,
        split: Literal["train", "eval"] = "train",
        workers: int = 1,
        check_seq_len: int | None = None,
        log: Callable[[str], Path] | None = None,
        limits: PoolLimits | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            config: the environment.
            host: starts the processes.
            access: to the model.
            split: which examples.
            workers: how many processes share the groups.
            check_seq_len: refuse to start if one of the first prompts has so many tokens; None looks at none.
            log: from a name to the file that takes the output of the worker of that name (`RunPaths.log`); None leaves
                it where main's errors go.
            limits: what to put up with.
        """
        limits = limits or PoolLimits(start_s=config.start_timeout, silence_s=config.silence_timeout)
        self.name = config.label
        self.deaths = 0
        self._host = host
        self._limits = limits
        self._patience = Patience(
            limits.start_s,
            None if config.timeout is None else config.timeout + limits.grace_s,
            limits.silence_s if config.timeout is None else config.timeout + limits.grace_s,
        )
        self._load = Load(
            env=config.model_dump_json().encode(),
            split=split,
            tokenizer=access.tokenizer,
            trust_remote_code=access.trust_remote_code,
            rendering=access.rendering.model_dump_json().encode(),
            trajectory_strategy=access.trajectory_strategy,
            api=access.api,
            keep_messages=access.keep_messages,
            model=access.model,
            api_key=access.api_key,
            request_timeout_s=access.request_timeout_s,
            timeout_s=config.timeout,
            check_seq_len=None,
            vocabulary=access.vocabulary,
        )
        self._check_seq_len = check_seq_len
        self._log = log
        self._slots = workers
        self._requests = itertools.count(1)
        self._examples = 0
        self._workers: list[RemoteWorker] = []
        self._solitary: set[RemoteWorker] = set()
        self._room = asyncio.Semaphore(_ALONE)
        self._change = asyncio.Event()
        self._broken: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        """Return how many examples the split has; 0 before the start."""
        return self._examples

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers; returns when all have loaded the environment.

        Raises:
            ConfigError: it cannot be loaded, has no examples, or one of the first prompts is too long.
            RunError: a worker died while it loaded, or took longer than `PoolLimits.start_s`.
        """
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._slots)]
        self._tasks = [asyncio.create_task(self._keep(slot, future)) for slot, future in enumerate(ready)]
        self._tasks.append(asyncio.create_task(self._watch()))
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the workers. Groups that are still being played end with `RunError`."""
        self._break(RunError(f"environment {self.name} is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers = [*self._workers, *self._solitary]
        self._workers.clear()
        await asyncio.gather(*(worker.close(_CLOSE_S) for worker in workers))

    async def run_group(
        self,
        example: int,
        count: int,
        url: str,
        sampling: Mapping[str, Any],
        seq_len: int,
        seed: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Play and score `count` rollouts of one example. Cancelling this cancels them in their worker.

        Args:
            example: its index.
            count: G.
            url: root of the server that samples all of them.
            sampling: vLLM sampling parameters; `max_tokens` is lowered to what fits into `seq_len`.
            seq_len: longest sample, tokens.
            seed: what the group's sampling is seeded from; each rollout and turn derives its own. None is unseeded.

        Returns:
            The rollouts. Their arrays are read-only.

        Raises:
            EnvironmentFailed: the environment raised, took longer than `env.timeout`, gave a reward or metric that is
                no usable number, or brought its worker down in every attempt.
            SampleTooLong: a prompt leaves no room for a completion.
            EngineLost, EngineError: the server cannot be reached, or refused; not the environment's fault.
            RunError: the environment cannot be played any more: its workers do not start again, or it is closed.
        """
        play = Play(0, example, count, url, dict(sampling), seq_len, None if seed is None else list(seed))
        attempts, alone = 0, False
        while True:
            play = msgspec.structs.replace(play, request=next(self._requests))
            try:
                if alone:
                    return await self._play_alone(play)
                return await (await self._least_loaded()).play(play)
            except WorkerDied as death:
                if death.culprit not in (None, play.request):
                    continue  # it died of another group
                attempts += 1
                alone = death.culprit == play.request
                if attempts > self._limits.retries:
                    doing = f"while playing example {example}" if alone else f"with example {example} aboard"
                    raise EnvironmentFailed(f"its worker {death} {doing}, the last of {attempts} attempts") from None

    async def _least_loaded(self) -> RemoteWorker:
        while not (alive := [worker for worker in self._workers if not worker.died.done()]):
            if self._broken is not None:
                raise RunError(str(self._broken))
            self._change.clear()
            await self._change.wait()
        return min(alive, key=lambda worker: worker.in_flight)

    async def _play_alone(self, play: Play) -> list[Rollout]:
        async with self._room:
            worker = await self._start_worker("alone")
            self._solitary.add(worker)
            try:
                return await worker.play(play)
            finally:
                self._solitary.discard(worker)
                await worker.close(0)

    async def _keep(self, slot: int, ready: asyncio.Future[None]) -> None:
        """Keep one worker alive until cancelled."""
        while True:
            try:
                worker = await self._start_worker(str(slot), check=slot == 0 and not ready.done())
            except (ConfigError, RunError) as error:
                if ready.done():
                    self._break(error)
                else:
                    ready.set_exception(error)
                return
            self._workers.append(worker)
            self._change.set()
            if not ready.done():
                ready.set_result(None)
            death = await asyncio.shield(worker.died)
            self._workers.remove(worker)
            self.deaths += 1
            logger.warning("environment {}: worker {} {}; starting another", self.name, slot, death)

    async def _start_worker(self, name: str, check: bool = False) -> RemoteWorker:
        log = self._log(f"env_{self.name.replace('/', '_')}_{name}") if self._log is not None else None
        load = msgspec.structs.replace(self._load, check_seq_len=self._check_seq_len if check else None)
        for attempt in range(1, _STARTS + 1):
            try:
                worker = await RemoteWorker.start(self._host, load, log, self._patience)
                break
            except RunError as error:
                if check or attempt == _STARTS:
                    raise RunError(f"environment {self.name} {error}") from None
                logger.warning("environment {} {}; trying again", self.name, error)
        if self._examples not in (0, worker.examples):
            await worker.close(0)
            changed = f"had {self._examples} examples and now has {worker.examples}: its data set has changed"
            raise RunError(f"environment {self.name} {changed}")
        self._examples = worker.examples
        return worker

    async def _watch(self) -> None:
        """Look after the workers, unless this loop itself has just been kept from it: then they had no chance."""
        due = time.monotonic()
        while True:
            due = max(due, time.monotonic()) + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - due < _LOOK_S:
                for worker in [*self._workers, *self._solitary]:
                    worker.check()

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        self._change.set()
