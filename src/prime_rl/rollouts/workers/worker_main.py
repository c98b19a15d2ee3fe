"""The main function of an environment worker: loads one environment and runs groups.

The worker stores nothing: the orchestrator repeats the groups of a dead worker in another one.
"""

import asyncio
import gc
import importlib.util
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from types import ModuleType

import uvloop

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.loopback import bypass_proxies
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.core.types import Conversation, Split
from prime_rl.rollouts.agent_function import load_agent
from prime_rl.rollouts.clients.generation_stream import LoopTurns
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError
from prime_rl.rollouts.clients.openai_chat_client import ChatServer
from prime_rl.rollouts.environment_backend import LAST_CLASSIC, EnvironmentBackend, load_rewards
from prime_rl.rollouts.environment_id import find_environment
from prime_rl.rollouts.group_attempts import GroupAccount, check_arguments, check_scores, config_errors
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.separate.added_environments import with_added_packages
from prime_rl.rollouts.separate.crash_record import CrashRecord, current_group
from prime_rl.rollouts.separate.interpreters import needs_interpreter
from prime_rl.rollouts.separate.values import exports_taskset
from prime_rl.rollouts.workers import protocol
from prime_rl_sandbox.execution import use_settings
from prime_rl_sandbox.shared_sandbox import close_shared_sandboxes

_NUM_CHECKED_PROMPTS = 2000

_GC_THRESHOLDS = 25_000, 20, 5
"""Allocations until a garbage collection, and collections of a generation until one of the next.

With Python's 700, thousands of rollouts in progress are visited again and again: half a second per collection.
"""

_CONCURRENCY = 512
"""Concurrent rollouts that the thread and process pools are sized for, as in verifiers' workers."""


def work(connection: socket.socket, crash_record: CrashRecord) -> None:
    """Load the environment of the first command and run groups until the orchestrator disconnects."""
    command = protocol.receive(connection)
    if not isinstance(command, protocol.LoadEnvironment):
        return  # the orchestrator has disconnected
    try:
        worker = _Worker(command, crash_record, connection.sendall)
    except ConfigError as error:
        connection.sendall(protocol.frame(protocol.EnvironmentUnloadable(str(error))))
        return
    gc.freeze()  # otherwise garbage collection would scan all loaded objects again and again
    gc.set_threshold(*_GC_THRESHOLDS)
    backend = worker.backend
    worker.send(
        protocol.EnvironmentReady(
            len(backend),
            type(backend).__module__,
            backend.eval_split,
            worker.loaded.columns,
            worker.content_hash,
            worker.loaded.skipped,
        )
    )
    uvloop.run(worker.serve(connection))


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment that is ready to run.

    Attributes:
        backend: runs its groups.
        columns: of each example of an evaluation, those of `env.breakdown`.
        skipped: training examples whose prompt is too long, in order.
    """

    backend: EnvironmentBackend
    columns: list[dict[str, str]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def load_backend(command: protocol.LoadEnvironment, warn: Callable[[str], None]) -> LoadedEnvironment:
    """Load an environment and check its prompts.

    Raises:
        ConfigError: as `load`; or one of the first prompts is too long or cannot be rendered, or all are too long.
    """
    access, env = command.access, command.env
    use_settings(access.sandbox.settings)
    renderer = None
    if access.api == "generate":
        renderer = Renderer.load(
            access.tokenizer, access.trust_remote_code, access.rendering, access.trajectory_strategy
        )
    backend = load(env, renderer, command.split, access.keep_messages, warn)
    evaluates = command.split == "eval" and bool(env.breakdown)
    columns = [backend.columns(example) for example in range(len(backend) if evaluates else 0)]
    if command.check_seq_len is None:
        return LoadedEnvironment(backend, columns)
    return LoadedEnvironment(backend, columns, _check_prompts(backend, env, command.check_seq_len, warn))


def load(
    config: EnvConfig,
    renderer: Renderer | None,
    split: Split,
    keep_messages: bool = False,
    warn: Callable[[str], None] | None = None,
) -> EnvironmentBackend:
    """Load an environment. A module with `load_environment` is a classic one.

    Args:
        config: the environment.
        renderer: converts between messages and tokens; None if the server renders and is a `ChatServer`.
        split: which examples.
        keep_messages: make every rollout a `Conversation`, as always with a `ChatServer`.
        warn: gets warnings about the environment, now and later.

    Raises:
        ConfigError: there is none, it rejects its arguments, or needs another verifiers release.
    """
    bypass_proxies()  # of the policy endpoint, and of the tool servers of a taskset
    if config.interpreter is not None:
        from prime_rl.rollouts.verifiers.separate_environment import SeparateEnvironment

        return SeparateEnvironment(config, config.id, renderer, split, keep_messages, warn)
    module, is_taskset = _import(config)
    if is_taskset:
        from prime_rl.rollouts.verifiers.verifiers_v1 import TasksetEnvironment

        return TasksetEnvironment(config, module.__name__, renderer, split, keep_messages, warn)
    from prime_rl.rollouts.verifiers.verifiers_classic import ClassicEnvironment

    return ClassicEnvironment(config, module.__name__, renderer, split, keep_messages, warn)


def check_import(config: EnvConfig) -> None:
    """Import an environment and its functions, without data; packages of its own, or to be installed, are left out.

    Raises:
        ConfigError: as `load`, for what is wrong without data.
    """
    load_rewards(config.rewards, config.id)
    if config.agent is not None:
        load_agent(config, lambda *_: None)
    if config.install or needs_interpreter(with_added_packages(config)):
        return
    module, is_taskset = _import(config)
    if not is_taskset:
        check_arguments(module.load_environment, config.args, config.id)
    elif not exports_taskset(module):
        raise ConfigError(
            f"environment {config.id!r} ({module.__file__}) defines no load_environment(), and names no v1 taskset in "
            "`__all__`"
        )


def _import(config: EnvConfig) -> tuple[ModuleType, bool]:
    """Import the module of an environment, and return whether it is used as a v1 taskset."""
    found = find_environment(config.id)
    has_classic_api = importlib.util.find_spec("verifiers.legacy") is not None
    needs_classic_api = ConfigError(
        f"environment {config.id!r} uses the classic API, which verifiers {version('verifiers')} does not have; "
        f"run `uv pip install verifiers=={LAST_CLASSIC}`"
    )
    try:
        module = found.load()
    except Exception as error:  # foreign code may raise anything
        if isinstance(error, AttributeError | ImportError) and not has_classic_api:
            raise needs_classic_api from error
        reason = summarize_exception(error, full=True)
        raise ConfigError(f"environment {config.id!r} cannot be imported: {reason}") from error
    is_taskset = not hasattr(module, "load_environment") or (config.has_agent and exports_taskset(module))
    if not (is_taskset or has_classic_api):
        raise needs_classic_api
    return module, is_taskset


def _check_prompts(backend: EnvironmentBackend, env: EnvConfig, seq_len: int, warn: Callable[[str], None]) -> list[int]:
    """Check the first prompts, or find all that are too long if they are to be skipped.

    Without skipping, groups with a later prompt that is too long are dropped.
    """
    skips, skipped = env.long_prompts == "skip", list[int]()
    for example in range(len(backend) if skips else min(len(backend), _NUM_CHECKED_PROMPTS)):
        prompt = f"the prompt of example {example} of environment {env.label!r}"
        hint = "; change the data set, or the chat template (rendering.chat_template)"
        with config_errors(f"{prompt} cannot be rendered", hint):  # an image, a wrong column, an unknown role
            length = backend.prompt_tokens(example)
        if length < seq_len:
            continue
        if not skips:
            raise ConfigError(
                f"{prompt} has {length} tokens, which leaves no space in seq_len = {seq_len}; "
                'raise orchestrator.seq_len, filter the data set, or skip such examples with env.long_prompts = "skip"'
            )
        skipped.append(example)
    counted = (
        f"{len(skipped)} of {len(backend)} examples are skipped: their prompts leave no space in seq_len = {seq_len}"
    )
    if len(skipped) == len(backend):
        raise ConfigError(f"environment {env.label!r}: {counted}; raise orchestrator.seq_len")
    if skipped:
        warn(f'{counted} (env.long_prompts = "skip")')
    return skipped


class _Worker:
    """Loads an environment and runs its groups."""

    def __init__(
        self, command: protocol.LoadEnvironment, crash_record: CrashRecord, write: Callable[[bytes | bytearray], object]
    ) -> None:
        self._access = command.access
        self._crash_record = crash_record
        self._write = write  # the event loop's transport once it serves
        self._servers: dict[str, InferenceClient | ChatServer] = {}
        self._stack = AsyncExitStack()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._turns = LoopTurns(1)  # a group takes some milliseconds until it waits for the model
        self.loaded = load_backend(command, lambda text: self.send(protocol.EnvironmentWarning(text)))
        self.backend = self.loaded.backend
        with config_errors(f"the examples of environment {command.env.label!r} cannot be read"):
            self.content_hash = self.backend.content_hash()

    def send(self, report: protocol.WorkerReport) -> None:
        """Send a report to the orchestrator."""
        self._write(protocol.frame(report))

    async def serve(self, connection: socket.socket) -> None:
        """Run groups until the connection closes."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        self._crash_record.watch(loop)
        _widen_executors()
        transport, _ = await loop.create_unix_connection(
            lambda: protocol.Frames(self._receive, gone.set), sock=connection
        )

        def write(frame: bytes | bytearray) -> None:
            if not transport.is_closing():  # the orchestrator has ended
                transport.write(frame)

        self._write = write
        async with self._stack:
            await gone.wait()
            for task in self._running.values():
                _cancel(task)
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            await close_shared_sandboxes()

    def _receive(self, body: bytes) -> None:
        match protocol.decode_command(body):
            case protocol.RunGroup() as group:
                token = current_group.set(group.request)
                task = asyncio.create_task(self._answer(group))
                current_group.reset(token)
                self._running[group.request] = task
                task.add_done_callback(partial(self._forget, group.request))
            case protocol.CancelGroup(number):
                if number in self._running:
                    self._cancelled.add(number)
                    _cancel(self._running[number])

    def _forget(self, request: int, task: asyncio.Task[None]) -> None:
        """Remove a finished group, and report an exception of our own code.

        SystemExit ends this process; the orchestrator runs its groups again.
        """
        del self._running[request]
        self._cancelled.discard(request)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SystemExit):
            print(escape_control_chars("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
            self.send(protocol.GroupFailed(request, "defect", summarize_exception(error, full=True)))

    def _count_tokens(self, tokens: int) -> None:
        self._crash_record.sampled += tokens

    async def _answer(self, group: protocol.RunGroup) -> None:
        account = GroupAccount(
            self._count_tokens,
            lambda: self.send(protocol.RolloutStuck(group.request)),
            lambda: self.send(protocol.ScoringStarted(group.request)),
        )
        try:
            self._turns.resolve(turn := asyncio.get_running_loop().create_future(), None)
            await turn
            async with (await self._connect(group.url)).pinned() as server:
                rollouts = await self.backend.run_group(
                    group.example, group.count, server, group.sampling, group.seq_len, group.seed, account
                )
            for rollout in rollouts:
                check_scores(rollout)
        except asyncio.CancelledError:
            # Otherwise the process exits, and the orchestrator runs the group again.
            if group.request in self._cancelled:
                self.send(_failed(group, account, "cancelled", "it was cancelled"))
            raise
        except tuple(protocol.FAILURES.values()) as error:
            kind = next(kind for kind, failure in protocol.FAILURES.items() if isinstance(error, failure))
            self.send(_failed(group, account, kind, str(error), error))
        else:
            conversations = [rollout for rollout in rollouts if isinstance(rollout, Conversation)]
            discarded = account.close(rollouts)
            self.send(
                protocol.GroupFinished(
                    group.request,
                    [] if conversations else rollouts,
                    conversations,
                    account.sampled,
                    discarded,
                    account.seconds,
                )
            )

    async def _connect(self, url: str) -> InferenceClient | ChatServer:
        if (server := self._servers.get(url)) is None:
            model, key, timeout_seconds = self._access.model, self._access.api_key, self._access.request_timeout_seconds
            if self._access.api == "chat":
                server = ChatServer(url, model, key, timeout_seconds)
            else:
                server = InferenceClient(url, model, "", key, timeout_seconds, vocabulary=self._access.vocabulary)
            self._servers[url] = server
            await self._stack.enter_async_context(server)
        return server


_DISCARD_REASONS: dict[protocol.FailureKind, str] = {
    "engine_lost": "replayed",
    "engine_error": "replayed",
    "cancelled": "cancelled",
}
"""Why the rollouts of a failed group are discarded (`protocol.REASONS`); by default `failed`."""


def _failed(
    group: protocol.RunGroup,
    account: GroupAccount,
    kind: protocol.FailureKind,
    message: str,
    error: Exception | None = None,
) -> protocol.GroupFailed:
    """Return the report of a group without rollouts."""
    discarded = account.close_failed(_DISCARD_REASONS.get(kind, "failed"), group.count)
    status, timed_out = (error.status, error.timed_out) if isinstance(error, InferenceError) else (None, False)
    return protocol.GroupFailed(group.request, kind, message, status, timed_out, account.sampled, discarded)


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a group once; a second cancellation would interrupt its cleanup."""
    if not task.cancelling():
        task.cancel()


def _widen_executors() -> None:
    """Size the thread pool of the running loop and the process pool of `MathRubric` as in verifiers' workers.

    With the default sizes, tools and rewards in threads wait for each other, and answers that wait too long for
    grading count 0.
    """
    with suppress(ImportError):  # a verifiers release without the classic API does not have these pools
        from verifiers.utils.thread_utils import install_default_executor, scale_executors

        scale_executors(concurrency=_CONCURRENCY)
        install_default_executor()
