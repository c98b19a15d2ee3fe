"""Versions in the memory of rank 0, sent to inference servers with NCCL or IPC, through vLLM's weight transfer.

The manifest says where to fetch a version, and `prime_rl.inference.worker.weight_receiver` documents the protocol. A
server requests a version when the orchestrator requests the update. The workers of a server form a group, and groups
are served one after the other. A failed worker aborts the transfer, an unresponsive one does so after the timeout; the
server then reports the error to the orchestrator (I7).
"""

import base64
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from loguru import logger
from torch import Tensor

from prime_rl.configs.training.broadcast import FileBroadcastConfig, IPCBroadcastConfig, TransferConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.ports import address_family, join_host_port
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.wait_for import DeadlineError, start_daemon_future
from prime_rl.storage.weights.transfer_channel import (
    ChannelError,
    Message,
    TransferChannel,
    TransferDescriptor,
    receive_all,
)
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync.transport import (
    FilesystemTransport,
    Hashes,
    PieceExchange,
    WeightTransport,
    raw_tensors,
)


class MemoryTransport(WeightTransport):
    """Gathers each version on rank 0 and serves it from there until two newer versions exist.

    The last version is written to files, since the trainer exits after it.
    """

    @classmethod
    def check_device(cls, options: TransferConfig, world: World) -> None:
        """Raise ConfigError if there is no GPU, or vLLM cannot be imported."""
        if world.device.type != "cuda":
            raise ConfigError(
                f"weight_broadcast.type = {options.type!r} needs a GPU, but there is none; use 'filesystem'"
            )
        if world.is_main:  # before training, because the import changes settings of torch's compiler
            try:
                import_module("vllm.distributed.weight_transfer")
            except ImportError as error:
                raise ConfigError(
                    f"weight_broadcast.type = {options.type!r} sends through vLLM, which cannot be imported ({error}); "
                    "run `uv sync --extra gpu`, or use 'filesystem'"
                ) from error

    def __init__(self, options: TransferConfig, exchange: PieceExchange) -> None:
        """Listen on rank 0. All ranks call it together.

        Raises:
            ConfigError: cannot listen, or the transport does not support several ranks.
        """
        super().__init__(options, exchange)
        world = exchange.world
        if options.type == "ipc" and world.size > 1:
            raise ConfigError(
                f"weight_broadcast.type = 'ipc' is for one trainer rank that shares its GPU with inference, and there "
                f"are {world.size}; use 'nccl' or 'filesystem'"
            )
        self._files, self._is_last = FilesystemTransport(FileBroadcastConfig(), exchange), False
        self._sender: WeightSender | None = None
        self._descriptor: TransferDescriptor | None = None
        self._ranks.on_main(self._open)

    def begin(self, name: str, version: PolicyVersion, last: bool) -> None:
        """Write the `last` version to files."""
        self._is_last = last

    def deliver(self, directory: Path, buffer: Tensor, name: str) -> list[Hashes]:
        """Gather the version in the memory of rank 0; the hashes are those of a single file."""
        if self._is_last:
            self._descriptor, self.bytes_in_memory = None, 0
            return self._files.deliver(directory, buffer, name)
        self._ranks.on_main(lambda: None if self._sender is None else self._sender.evict_old_versions())
        tensors: dict[str, Tensor] = {}
        in_buffer = buffer.untyped_storage().data_ptr()
        for file in self._exchange.plan.files:
            for tensor_name, tensor in self._exchange.collect([replace(file, owner=0)], buffer) or ():
                # The next version overwrites the buffer.
                is_view = tensor.untyped_storage().data_ptr() == in_buffer
                tensors[tensor_name] = tensor.clone() if is_view else tensor
        return self._ranks.gather(lambda: self._add_version(tensors, name))

    def manifest_fields(self) -> dict[str, Any]:
        """Describe where the latest version is served."""
        return {} if self._descriptor is None else {"transfer": self._descriptor.fields()}

    def check(self) -> None:
        """Raise RunError if a transfer failed and could not be aborted; the error names the receiver."""
        if self._sender is not None:
            self._sender.check()

    def close(self) -> None:
        """Finish the current transfers and stop serving."""
        if self._sender is not None:
            self._sender.close()

    def _open(self) -> None:
        self._sender = WeightSender(self._options, self._exchange.world.device)

    def _add_version(self, tensors: Mapping[str, Tensor], name: str) -> Hashes:
        if self._sender is None:
            return {}
        raw = raw_tensors(tensors)
        hashes = {tensor_name: tensor.digest(tensor_name) for tensor_name, tensor in raw.items()}
        options, sender = self._options, self._sender
        shapes = {tensor_name: (tensor.dtype, tensor.shape) for tensor_name, tensor in raw.items()}
        self._descriptor = TransferDescriptor(
            options.type, options.host, sender.port, sender.session, options.timeout_seconds, shapes
        )
        self.bytes_in_memory = sum(tensor.data.size for tensor in raw.values())
        self._sender.add_version(content_hash(hashes), name, tensors)
        return {"": hashes}


Tensors = Mapping[str, Tensor]

_HANDSHAKE_TIMEOUT_SECONDS = 30
_HANDSHAKE_BYTES = 2**16
"""Limits for the first message of a peer, which has not presented the session key yet."""
_ABORT_TIMEOUT_SECONDS = 15
_BUFFER_BYTES = 256 * 2**20
_BUFFERS = 2
_NUM_VERSIONS = 2
"""Versions in memory: the newest, and the previous one, which a server may be requesting at the moment."""


class TensorMetadata(NamedTuple):
    """Metadata that vLLM reads from a weight source."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class HostSource:
    """vLLM's `WeightSource`: tensors in host memory, moved to the device one by one."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: Tensors = {}
        self._device = device

    def metadata(self) -> list[TensorMetadata]:
        """Return name, dtype and shape of each tensor, in the order of iteration."""
        return [TensorMetadata(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to(self._device)


@dataclass(eq=False, slots=True)
class _Group:
    """The workers of one server.

    Attributes:
        size: number of workers.
        workers: the connected ones, by rank.
        engine: vLLM's trainer side, once the group is formed.
        failure: the first error of a worker.
        finished: set when the current transfer is complete or has failed.
    """

    size: int
    source: HostSource
    workers: dict[int, TransferChannel] = field(default_factory=dict)
    engine: Any = None
    failure: RunError | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def channels(self) -> list[TransferChannel]:
        """Channels in order of rank."""
        return [self.workers[rank] for rank in sorted(self.workers)]

    def describe(self) -> str:
        """Return the names of the connected workers."""
        return ", ".join(channel.peer for channel in self.channels)

    def abort(self) -> None:
        """Make blocking calls of a transfer return."""
        if self.engine is not None:
            self.engine.shutdown()


class _Client:
    """vLLM's control plane (`VLLMWeightSyncClient`), over our channels."""

    def __init__(self, group: _Group, timeout_seconds: float) -> None:
        self._group, self._timeout_seconds = group, timeout_seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Send the workers the request to form the transfer group."""
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        """Do nothing: the tensors are not loaded into the model yet."""

    def update_weights(self, update_info: Any) -> None:
        """Let the workers receive what the sender sends, or with ipc what its buffer contains."""
        info = dict(update_info)
        if "ipc_handles" in info:
            info["ipc_handles"] = encode_ipc_handles(info["ipc_handles"])
        self._call("update", {key: value for key, value in info.items() if value is not None})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Wait for the workers to verify the received version."""
        self._call("finish", {})

    def _call(self, do: str, info: Mapping[str, Any]) -> None:
        group = self._group
        try:
            for channel in group.channels:
                channel.send({"do": do, "info": info})
            answers = receive_all(group.channels, self._timeout_seconds)
            for channel, answer in zip(group.channels, answers, strict=True):
                if "error" in answer:
                    raise ChannelError(f"{channel.peer}: {answer['error']}")
        except RunError as error:
            group.failure = error
            group.finished.set()
            raise


class WeightSender:
    """Keeps the newest versions in memory and serves them, in background threads."""

    def __init__(self, options: TransferConfig, device: torch.device) -> None:
        """Listen at the host and port of `options`, or raise ConfigError; send tensors from `device`."""
        self.options = options
        self.session = secrets.token_hex(16)
        self._device = device
        self._versions: dict[str, tuple[str, Tensors]] = {}
        self._sending: dict[_Group, str] = {}
        self._groups: dict[str, _Group] = {}
        self._changed = threading.Condition()
        self._transfer_lock = threading.Lock()
        self._error: RunError | None = None
        self._closed = False
        self._listener = _listen(options.host, options.port)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="transfer-listen", daemon=True).start()

    def evict_old_versions(self) -> None:
        """Drop all but the newest version. Raises RunError if an older version is still being sent."""
        with self._changed:
            for digest in list(self._versions)[: 1 - _NUM_VERSIONS]:
                del self._versions[digest]
            timeout_seconds = self.options.timeout_seconds
            if not self._changed.wait_for(
                lambda: self._versions.keys() >= set(self._sending.values()), timeout_seconds
            ):
                busy = ", ".join(group.describe() for group in self._sending)
                raise RunError(f"waited {timeout_seconds:.0f} s for {busy}, which still receives an older version")

    def add_version(self, digest: str, name: str, tensors: Tensors) -> None:
        """Serve the version with this content hash; `name` is for messages."""
        # vLLM packs without gaps; with the largest elements first, all tensors are aligned.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        with self._changed:
            self._versions.pop(digest, None)  # a skipped update publishes the same weights again
            self._versions[digest] = (name, tensors)

    def check(self) -> None:
        """Raise RunError if a transfer failed and could not be aborted; the error names the receiver."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Finish the current transfers and stop serving."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._sending or self._error is not None, self.options.timeout_seconds)
            groups = list(self._groups.values())
        with suppress(OSError):  # on some systems this does not wake accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for group in groups:
            for channel in group.channels:
                channel.disconnect()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while not self._closed:
                connection, (host, *_) = self._listener.accept()
                arguments = connection, host
                threading.Thread(target=self._register, args=arguments, name="transfer-handshake", daemon=True).start()

    def _register(self, connection: socket.socket, host: str) -> None:
        """Add a worker to its group; the thread of the first worker serves the group."""
        channel = TransferChannel(connection, f"connection from {host}")
        try:
            handshake = channel.receive(_HANDSHAKE_TIMEOUT_SECONDS, max_bytes=_HANDSHAKE_BYTES)
            if not secrets.compare_digest(str(handshake.get("session")), self.session):
                channel.send({"error": "this is not the trainer that published the version"})
                channel.close()
                return
            name, rank, size = str(handshake["group"]), int(handshake["rank"]), int(handshake["workers"])
            channel.peer = str(handshake["name"])
        except (ChannelError, DeadlineError, KeyError, ValueError, TypeError) as error:
            logger.warning("rejected connection from {}: bad handshake: {}", channel.peer, error)
            channel.close()
            return
        with self._changed:
            first = name not in self._groups
            group = self._groups.setdefault(name, _Group(size, HostSource(self._device)))
            group.workers[rank] = channel
            self._changed.notify_all()
        if first:
            self._serve(name, group)

    def _serve(self, name: str, group: _Group) -> None:
        try:
            self._assemble(group)
            while (requests := self._receive_requests(group)) is not None:
                self._send(group, *self._requested_version(group, requests))
        except RunError as error:
            logger.warning("disconnecting the {} workers of a server: {}", group.size, error)
            for channel in group.channels:
                with suppress(ChannelError):  # it has disconnected already
                    channel.send({"error": str(error)})
        finally:
            with self._changed:
                self._groups.pop(name, None)
            group.abort()
            for channel in group.channels:
                channel.close()

    def _assemble(self, group: _Group) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(group.workers) == group.size, self.options.timeout_seconds):
                absent = sorted(set(range(group.size)) - group.workers.keys())
                raise DeadlineError(
                    f"waited {self.options.timeout_seconds:.0f} s for workers {absent} of {group.size}; "
                    f"{group.channels[0].peer} is connected"
                )

    def _receive_requests(self, group: _Group) -> list[Message] | None:
        """Wait for the next request; None if a worker disconnects: its server exits or forms a new group."""
        try:
            return receive_all(group.channels, None)
        except ChannelError as error:
            logger.info("{}", error)
            return None

    def _requested_version(self, group: _Group, requests: list[Message]) -> tuple[str, Tensors]:
        digests = {str(request.get("want")) for request in requests}
        with self._changed:
            if len(digests) != 1 or self._closed:
                raise ChannelError("the trainer is exiting" if self._closed else "the workers request several versions")
            [digest] = digests
            if digest not in self._versions:
                newest = next((name for name, _ in reversed(self._versions.values())), "none")
                raise ChannelError(f"the trainer no longer has the version in memory; its newest version is {newest}")
            self._sending[group] = digest
            return self._versions[digest]

    def _send(self, group: _Group, name: str, tensors: Tensors) -> None:
        """Send in a thread that can be abandoned. Raises RunError, which names the receiver."""

        def work() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a new thread starts on device 0
                group.source.tensors = tensors
                if group.engine is None:
                    client = _Client(group, self.options.timeout_seconds)
                    group.engine = open_engine(self.options, group.source, client, group)
                group.engine.send_weights()
            finally:
                group.source.tensors = {}
                group.finished.set()

        with self._transfer_lock:
            group.finished.clear()
            sent = start_daemon_future(work, "transfer")
            # Each call has its own timeout and sets `finished`; a transfer makes at most three calls.
            group.finished.wait(4 * self.options.timeout_seconds)
            if futures.wait([sent], 1).not_done:
                group.abort()
                futures.wait([sent], _ABORT_TIMEOUT_SECONDS)
        with self._changed:
            del self._sending[group]
            self._changed.notify_all()
        reason = group.failure or (sent.exception() if sent.done() else None)
        if not sent.done():
            why = reason or f"waiting for {group.describe()}"
            self._error = RunError(f"cannot send version {name}, and cannot abort the transfer: {why}")
            raise self._error
        if reason is not None:
            raise RunError(f"version {name} was not sent: {reason}")


def open_engine(options: TransferConfig, source: HostSource, client: Any, group: _Group) -> Any:
    """Form the group with vLLM's engine for the transport."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    info: Any
    if isinstance(options, IPCBroadcastConfig):
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # IPC rejects a tensor that is larger than the buffer; NCCL sends it as one chunk.
        largest = max(tensor.nbytes for tensor in source.tensors.values())
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=max(_BUFFER_BYTES, largest))
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.create_server((options.host, 0)) as probe:
            free_port: int = probe.getsockname()[1]
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=options.host,
            master_port=free_port,
            world_size=1 + group.size,
            packed=True,
            packed_buffer_size_bytes=_BUFFER_BYTES,
            packed_num_buffers=_BUFFERS,
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=cast("Any", source))


def encode_ipc_handles(handles: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Encode the result of `torch.multiprocessing.reductions.reduce_tensor` for a uint8 buffer as JSON, by GPU."""
    return {gpu: [_write_argument(argument) for argument in arguments] for gpu, arguments in handles.items()}


def _write_argument(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, type):
        return {"class": value.__name__}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    return list(value) if isinstance(value, tuple) else value


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=address_family(host), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"weight_broadcast.port: cannot listen on {join_host_port(host, port)} ({error.strerror or error}); "
            "set another port, or weight_broadcast.host to the address of this machine that inference can reach"
        ) from None
