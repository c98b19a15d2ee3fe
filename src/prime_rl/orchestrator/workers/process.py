"""An environment worker: loads one environment, plays the groups it is given, and answers one message each.

It keeps nothing that would be missed: whatever dies with it can be played again elsewhere.
"""

import asyncio
import gc
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import uvloop

from prime_rl.configs.rendering import RenderingConfig
from prime_rl.configs.shared import EnvConfig
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost
from prime_rl.orchestrator.renderer import Renderer
from prime_rl.orchestrator.workers import adapters
from prime_rl.orchestrator.workers.blackbox import BlackBox, current_group
from prime_rl.orchestrator.workers.chat import ChatServer
from prime_rl.orchestrator.workers.failures import EnvironmentFailed, SampleTooLong, one_line
from prime_rl.orchestrator.workers.protocol import (
    Cancel,
    Failed,
    Frames,
    Load,
    Play,
    Played,
    Ready,
    Report,
    Unloadable,
    decode_order,
    frame,
    receive,
)
from prime_rl.orchestrator.workers.scores import check_scores
from prime_rl.plain import visible

BEAT_S = 0.25
"""Seconds between two beats of a worker's event loop."""

_CHECKED_PROMPTS = 2000


def work(connection: socket.socket, box: BlackBox) -> None:
    """Load what the first order says and play until main hangs up."""
    order = receive(connection)
    if not isinstance(order, Load):
        return  # main has gone
    try:
        adapter = _load(order)
    except ConfigError as error:
        connection.sendall(frame(Unloadable(str(error))))
        return
    gc.freeze()  # what is loaded stays; without it, collections would cost as much as the rollouts
    connection.sendall(frame(Ready(len(adapter), type(adapter).__module__)))
    uvloop.run(_Worker(order, adapter, box).serve(connection))


def _load(order: Load) -> adapters.Adapter:
    config = EnvConfig.model_validate_json(order.env)
    rendering = RenderingConfig.model_validate_json(order.rendering)
    renderer = None
    if order.api == "generate":
        renderer = Renderer.load(order.tokenizer, order.trust_remote_code, rendering, order.trajectory_strategy)
    adapter = adapters.load(config, renderer, order.split, order.keep_messages)
    if order.check_seq_len is not None:
        _check_prompts(adapter, config.label, order.check_seq_len)
    return adapter


def _check_prompts(adapter: adapters.Adapter, name: str, seq_len: int) -> None:
    """Raise ConfigError if one of the first prompts leaves no room; later ones are dropped when they come up."""
    for example in range(min(len(adapter), _CHECKED_PROMPTS)):
        length = adapter.prompt_tokens(example)
        if length >= seq_len:
            raise ConfigError(
                f"the prompt of example {example} of environment {name!r} has {length} tokens, which leaves "
                f"no room in seq_len = {seq_len}; raise orchestrator.seq_len or filter the data set"
            )


class _Worker:
    """The serving side of one connection."""

    def __init__(self, order: Load, adapter: adapters.Adapter, box: BlackBox) -> None:
        self._order = order
        self._adapter = adapter
        self._box = box
        self._engines: dict[str, Engine | ChatServer] = {}
        self._stack = AsyncExitStack()
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._send: Callable[[Report], None] = lambda _: None

    async def serve(self, connection: socket.socket) -> None:
        """Play what is asked until the other side is gone."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        self._box.watch(loop)
        self._beat(loop)
        transport, _ = await loop.create_unix_connection(lambda: Frames(self._receive, gone.set), sock=connection)
        self._send = lambda report: transport.write(frame(report))
        async with self._stack:
            await gone.wait()
            for task in self._playing.values():
                task.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._box.beat()
        loop.call_later(BEAT_S, self._beat, loop)

    def _receive(self, body: bytes) -> None:
        match decode_order(body):
            case Play() as play:
                token = current_group.set(play.request)
                task = asyncio.create_task(self._answer(play))
                current_group.reset(token)
                self._playing[play.request] = task
                task.add_done_callback(partial(self._forget, play.request))
            case Cancel(request):
                if (playing := self._playing.get(request)) is not None:
                    playing.cancel()

    def _forget(self, request: int, task: asyncio.Task[None]) -> None:
        """Drop a group that has ended. What an adapter lets through is a defect of ours: main must hear of it."""
        del self._playing[request]
        if not task.cancelled() and (error := task.exception()) is not None:
            print(visible("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
            self._send(Failed(request, "defect", one_line(error)))

    async def _answer(self, play: Play) -> None:
        self._send(await self._report(play))

    async def _report(self, play: Play) -> Report:
        limit = asyncio.timeout(self._order.timeout_s)
        try:
            async with limit, self._server(play.url) as server:
                rollouts = await self._adapter.run_group(
                    play.example, play.count, server, play.sampling, play.seq_len, play.seed
                )
            for rollout in rollouts:
                check_scores(rollout)
            return Played.pack(play.request, rollouts)
        except EnvironmentFailed as error:
            return Failed(play.request, "environment", str(error))
        except SampleTooLong as error:
            return Failed(play.request, "too_long", str(error))
        except EngineLost as error:
            return Failed(play.request, "engine_lost", str(error))
        except EngineError as error:
            return Failed(play.request, "engine_error", str(error), error.status, error.late)
        except TimeoutError:
            if not limit.expired():
                raise
            took = f"example {play.example} took longer than {self._order.timeout_s:g} s (env.timeout)"
            return Failed(play.request, "environment", took)

    @asynccontextmanager
    async def _server(self, url: str) -> AsyncIterator[Engine | ChatServer]:
        """Lend the server at `url` for a group; one that tells no versions of tokens, while it has one version."""
        engine = await self._engine(url)
        if isinstance(engine, ChatServer):
            async with engine.pinned() as server:
                yield server
        else:
            yield engine

    async def _engine(self, url: str) -> Engine | ChatServer:
        if (engine := self._engines.get(url)) is None:
            model, key, timeout_s = self._order.model, self._order.api_key, self._order.request_timeout_s
            if self._order.api == "chat":
                engine = ChatServer(url, model, key, timeout_s)
            else:
                engine = Engine(url, model, "", key, timeout_s, vocabulary=self._order.vocabulary)
            self._engines[url] = engine
            await self._stack.enter_async_context(engine)
        return engine
