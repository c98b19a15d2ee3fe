"""The HTTP server of a Tinker server: orders the operations of clients for the trainer, and samples."""

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp
import msgspec
import uvicorn
from loguru import logger
from starlette.applications import Starlette

from prime_rl.core.api_key import read_api_key
from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.framing import FrameReader, pack_frame
from prime_rl.core.logs import set_up_logging
from prime_rl.core.loopback import bypass_proxies, is_loopback
from prime_rl.core.ports import join_host_port, listen
from prime_rl.liveness.parent_process import die_with_parent, is_supervised
from prime_rl.storage.model_files import find_model
from prime_rl_tinker.app import make_app
from prime_rl_tinker.checkpoint_store import CheckpointStore
from prime_rl_tinker.config import TinkerConfig
from prime_rl_tinker.messages import MAX_MESSAGE_BYTES, Answer, Operation
from prime_rl_tinker.samplers import Samplers
from prime_rl_tinker.sequencer import Sequencer
from prime_rl_tinker.service import ServedModel, Service

_TIDY_SECONDS = 30.0
"""Longest pause between looks for silent sessions."""
_CLOSE_SECONDS = 2


class TrainerLink:
    """The connection to rank 0 of the trainer."""

    def __init__(self) -> None:
        self._connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )
        self._frames = FrameReader(MAX_MESSAGE_BYTES)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the trainer's connection."""
        self._connected.set_result((reader, writer))

    async def execute(self, operations: Sequence[Operation]) -> Sequence[Answer]:
        """Have the trainer execute operations. Raises RunError if it is lost."""
        reader, writer = await asyncio.shield(self._connected)
        writer.write(pack_frame(msgspec.msgpack.encode(operations)))
        await writer.drain()
        while True:
            data = await reader.read(2**20)
            if not data:
                raise RunError("the trainer closed its connection")
            if bodies := self._frames.feed(data):
                return msgspec.msgpack.decode(bodies[0], type=list[Answer])


def read_key(config: TinkerConfig) -> str | None:
    """Return the key that clients must send. Raises ConfigError if the address needs one, or it is no Tinker key."""
    key = read_api_key(config.server.api_key_var)
    if key is None and not is_loopback(config.server.host):
        raise ConfigError(f"server.host = {config.server.host} needs an API key in {config.server.api_key_var}")
    if key is not None and not key.startswith("tml-"):
        raise ConfigError(f"{config.server.api_key_var}: the SDK takes only keys that begin with tml-")
    return key


async def serve(config: TinkerConfig, architecture: str, vocabulary: int) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the trainer."""
    key, inference = read_key(config), config.served_model
    config.socket.unlink(missing_ok=True)
    link = TrainerLink()
    headers = (
        {} if (token := read_api_key(inference.server.api_key_var)) is None else {"Authorization": f"Bearer {token}"}
    )
    url = f"http://{join_host_port(inference.server.host, inference.server.port)}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # the server may close one that is kept as it is used
    async with (
        await asyncio.start_unix_server(link.accept, str(config.socket)),
        aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session,
    ):
        sequencer = Sequencer(link.execute, config.server.gap_timeout_seconds)
        aliases = (name for name in config.aliases_of_model if name != config.model.name)
        names = (*aliases, config.model.name)
        served = ServedModel(names, architecture, vocabulary, config.model.seq_len, config.aliases_of_losses)
        samplers = Samplers(session, url, config.model.name, inference.max_loras)
        store = CheckpointStore(config.output_dir.resolve())
        store.recover()
        service = Service(served, store, sequencer, samplers, config.server.session_timeout_seconds)
        with listen(config.server.host, config.server.port, f"--port {config.server.port}") as listener:
            server = _Server(make_app(service, key))
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
            jobs = [
                asyncio.ensure_future(work)
                for work in (
                    server.serve(sockets=[listener]),
                    sequencer.run(),
                    _tidy(service, config.server.session_timeout_seconds),
                )
            ]
            logger.info(
                f"serving {', '.join(names)} for Tinker clients at http://{config.server.host}:{config.server.port}"
            )
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            for job in jobs[1:]:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            for job in done:
                job.result()


class _Server(uvicorn.Server):
    """An HTTP server that leaves the signals to its process."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_CLOSE_SECONDS
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing. By default the server would end the process by the same signal when it has closed."""
        yield


async def _tidy(service: Service, session_seconds: float) -> None:
    while True:
        await asyncio.sleep(min(_TIDY_SECONDS, session_seconds / 4))
        service.tidy()


def run(config: TinkerConfig) -> None:
    """Serve."""
    if is_supervised():
        die_with_parent()
    from transformers import AutoConfig

    set_up_logging(config.log.level, config.log.utc, config.run_paths.log("api"))
    bypass_proxies()
    model = config.model
    folder = find_model(model.name, model.revision, model.download_timeout_seconds, with_weights=False)
    described = AutoConfig.from_pretrained(folder)
    asyncio.run(serve(config, described.model_type, int(described.get_text_config().vocab_size)))


if __name__ == "__main__":
    run_main(lambda: run(TinkerConfig.load(sys.argv[1:])))
