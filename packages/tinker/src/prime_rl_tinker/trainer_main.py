"""A rank of the trainer of a Tinker server: receives operations from the HTTP server, and executes them."""

import os
import socket
import sys
import time

import msgspec
import torch
import torch.distributed as dist

from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import RunError
from prime_rl.core.framing import FrameReader, pack_frame
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.process_setup import limit_process
from prime_rl.trainer.rank_start import start_rank
from prime_rl_tinker.config import TinkerConfig
from prime_rl_tinker.messages import MAX_MESSAGE_BYTES, Operation
from prime_rl_tinker.model_trainer import ModelTrainer

_IDLE_SECONDS = 5.0
"""The other ranks hear from rank 0 at least this often, well within the time limit of their collectives."""
_CONNECT_SECONDS = 1800.0
_NICENESS = 10
"""Where trainer and inference server share cores, a sample that a client waits for has priority."""


def run(config: TinkerConfig) -> None:
    """Execute operations until the HTTP server closes the connection."""
    os.nice(_NICENESS)
    limit_process()
    with (
        start_rank(config.log, config.run_paths) as heartbeat,
        join_world(config.device, config.dist_timeout_seconds, config.trained_model) as world,
    ):
        heartbeat.enter("load the model")
        trainer = ModelTrainer(config.trained_model, world, heartbeat.advance)
        link = _Link(config) if world.is_main else None
        while True:
            heartbeat.enter("wait for operations")
            received = [link.receive() if link is not None else None]
            dist.broadcast_object_list(received, device=torch.device("cpu"))
            (message,) = received
            if message is None:
                return
            if not message:
                continue
            heartbeat.enter("execute operations", config.dist_timeout_seconds)
            answers = trainer.execute(msgspec.msgpack.decode(message, type=list[Operation]))
            if link is not None:
                link.send(msgspec.msgpack.encode(answers))


class _Link:
    """The connection of rank 0 to the HTTP server."""

    def __init__(self, config: TinkerConfig) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(str(config.socket))
                break
            except OSError as error:
                self._socket.close()
                if time.monotonic() > deadline:
                    raise RunError(f"the HTTP server does not listen on {config.socket}: {error}") from error
                time.sleep(0.1)
        self._socket.settimeout(_IDLE_SECONDS)
        self._reader = FrameReader(MAX_MESSAGE_BYTES)

    def receive(self) -> bytes | None:
        """Return the next message, empty if there is none for a while, None at the end of the connection."""
        while True:
            try:
                data = self._socket.recv(2**20)
            except TimeoutError:
                return b""
            if not data:
                return None
            if bodies := self._reader.feed(data):
                return bodies[0]  # the server waits for the answer before it sends the next one

    def send(self, body: bytes) -> None:
        """Send a message."""
        self._socket.settimeout(None)
        self._socket.sendall(pack_frame(body))
        self._socket.settimeout(_IDLE_SECONDS)


if __name__ == "__main__":
    run_main(lambda: run(TinkerConfig.load(sys.argv[1:])))
