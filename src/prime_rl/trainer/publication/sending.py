"""Sending versions from the memory of rank 0 to whichever server asks, by vLLM's own weight transfer.

The protocol is in `prime_rl.inference.transfer`. Nothing here waits for a server: it asks when the orchestrator tells
it to, and again after it was started anew. All workers of a server form a group; groups are served one at a time.

I7: a worker that dies ends the group at once, one that does not answer after `timeout_s`; the transfer is aborted, and
the server tells the orchestrator why. What cannot be aborted ends the run: forming an NCCL group is one call that only
its last member ends.
"""

import base64
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from loguru import logger
from torch import Tensor

from prime_rl.configs.broadcast import IPCBroadcastConfig, TransferConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run.channel import Channel, ChannelError, Message, receive_all
from prime_rl.run.wait import DeadlineError

Tensors = Mapping[str, Tensor]

_HELLO_S = 30
_ABORT_S = 15
_BUFFER_BYTES = 256 * 2**20
_BUFFERS = 2
_HELD = 2
"""Versions in memory: the newest, and the one before, which a server may be asking for in this very moment."""


class Meta(NamedTuple):
    """What vLLM asks a source for, besides the tensors."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class HostSource:
    """vLLM's `WeightSource`: tensors in host memory, one after the other on the device."""

    def __init__(self, device: torch.device) -> None:
        """Send from `device`."""
        self.tensors: Tensors = {}
        self._device = device

    def metadata(self) -> list[Meta]:
        """Describe what iteration yields."""
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to(self._device)


@dataclass(eq=False, slots=True)
class _Group:
    """The workers of one server.

    Attributes:
        size: how many they are.
        workers: those that have come, by rank.
        engine: vLLM's trainer side, once it is formed.
        failure: what a worker said or did, while others may still be at it.
        over: set when there is nothing left to wait for: all has arrived, or it has failed.
    """

    size: int
    source: HostSource
    workers: dict[int, Channel] = field(default_factory=dict)
    engine: Any = None
    failure: RunError | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def channels(self) -> list[Channel]:
        """In order of rank."""
        return [self.workers[rank] for rank in sorted(self.workers)]

    def abort(self) -> None:
        """Let what blocks in a transfer return."""
        if self.engine is not None:
            self.engine.shutdown()


class _Client:
    """vLLM's control plane (`VLLMWeightSyncClient`), over our channels."""

    def __init__(self, group: _Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Form the group."""
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        """Nothing to do: the tensors do not go into the model yet."""

    def update_weights(self, update_info: Any) -> None:
        """Receive; while the sender sends, or, for ipc, what its buffer holds."""
        info = dict(update_info)
        if "ipc_handles" in info:
            info["ipc_handles"] = write_handles(info["ipc_handles"])
        self._call("update", {key: value for key, value in info.items() if value is not None})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All has arrived, and is what was published: this is where a worker says so."""
        self._call("finish", {})

    def _call(self, do: str, info: Mapping[str, Any]) -> None:
        group = self._group
        try:
            for channel in group.channels:
                channel.send({"do": do, "info": info})
            answers = receive_all(group.channels, self._timeout_s)
            for channel, answer in zip(group.channels, answers, strict=True):
                if "error" in answer:
                    raise ChannelError(f"{channel.peer}: {answer['error']}")
        except RunError as error:
            group.failure = error
            group.over.set()
            raise


class Sender:
    """Holds the newest versions and serves them, in threads of its own."""

    def __init__(self, options: TransferConfig, device: torch.device) -> None:
        """Listen at the host and port of `options`; tensors leave from `device`.

        Raises:
            ConfigError: cannot listen there.
        """
        self.options = options
        self.session = secrets.token_hex(16)
        self._device = device
        self._held: dict[str, tuple[str, Tensors]] = {}
        self._sending: dict[_Group, str] = {}
        self._groups: dict[str, _Group] = {}
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._error: RunError | None = None
        self._closed = False
        self._listener = _listen(options.host, options.port)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="transfer-listen", daemon=True).start()

    def make_room(self) -> None:
        """Wait until another version fits into memory beside the newest.

        Raises:
            RunError: an older one is still being sent.
        """
        with self._changed:
            for digest in list(self._held)[: 1 - _HELD]:
                del self._held[digest]
            if not self._changed.wait_for(self._old_are_sent, self.options.timeout):
                busy = ", ".join(channel.peer for group in self._sending for channel in group.channels)
                raise RunError(f"waited {self.options.timeout:.0f} s for {busy}, which still receives an older version")

    def hold(self, digest: str, name: str, tensors: Tensors) -> None:
        """Serve the version with this content hash from now on; `name` is for messages."""
        # vLLM packs without gaps: the largest elements first, or a smaller one would leave the next unaligned.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        with self._changed:
            self._held.pop(digest, None)  # an update that was skipped publishes the same weights again
            self._held[digest] = (name, tensors)

    def check(self) -> None:
        """Raise what ends the run.

        Raises:
            RunError: a transfer failed and could not be aborted; names who was waited for.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let transfers that are under way come to their end, and serve no more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._sending or self._error is not None, self.options.timeout)
            groups = list(self._groups.values())
        with suppress(OSError):  # not everywhere does this wake the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for group in groups:
            for channel in group.channels:
                channel.hang_up()

    def _old_are_sent(self) -> bool:
        return all(digest in self._held for digest in self._sending.values())

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                return  # closed
            channel = Channel(connection, f"a caller from {host}")
            threading.Thread(target=self._welcome, args=(channel,), name="transfer-hello", daemon=True).start()

    def _welcome(self, channel: Channel) -> None:
        """Take a worker into its group; the thread of the first one serves the group to its end."""
        try:
            hello = channel.receive(_HELLO_S)
            if not secrets.compare_digest(str(hello.get("session")), self.session):
                channel.send({"error": "this is not the trainer that published the version"})
                channel.close()
                return
            name, rank, size = str(hello["group"]), int(hello["rank"]), int(hello["workers"])
            channel.peer = str(hello["name"])
        except (ChannelError, DeadlineError, KeyError, ValueError, TypeError) as error:
            logger.warning("{} did not introduce itself: {}", channel.peer, error)
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
            while (wants := self._wants(group)) is not None:
                self._send(group, *self._asked_for(group, wants))
        except RunError as error:
            self._tell(group, error)
        finally:
            with self._changed:
                self._groups.pop(name, None)
            group.abort()
            for channel in group.channels:
                channel.close()

    def _assemble(self, group: _Group) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(group.workers) == group.size, self.options.timeout):
                absent = sorted(set(range(group.size)) - group.workers.keys())
                raise DeadlineError(
                    f"waited {self.options.timeout:.0f} s for workers {absent} of {group.size}; "
                    f"{group.channels[0].peer} was there"
                )

    def _wants(self, group: _Group) -> list[Message] | None:
        """Wait for the next request; None if a worker leaves instead: its server ends, or begins a new group."""
        try:
            return receive_all(group.channels, None)
        except ChannelError as error:
            logger.info("{}", error)
            return None

    def _asked_for(self, group: _Group, wants: list[Message]) -> tuple[str, Tensors]:
        digests = {str(want.get("want")) for want in wants}
        with self._changed:
            if len(digests) != 1 or self._closed:
                raise ChannelError("the trainer ends" if self._closed else "the workers ask for different versions")
            [digest] = digests
            if digest not in self._held:
                newest = next((name for name, _ in reversed(self._held.values())), "none")
                raise ChannelError(f"the version is no longer in the trainer's memory; the newest there is {newest}")
            self._sending[group] = digest
            return self._held[digest]

    def _send(self, group: _Group, name: str, tensors: Tensors) -> None:
        """Send in a thread that can be given up.

        Raises:
            RunError: it failed; says at whom.
        """
        errors = list[Exception]()

        def work() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a thread begins with the first one
                group.source.tensors = tensors
                if group.engine is None:
                    group.engine = open_engine(self.options, group.source, _Client(group, self.options.timeout), group)
                group.engine.send_weights()
            except Exception as error:  # noqa: BLE001  raised again by the thread that waits
                errors.append(error)
            finally:
                group.source.tensors = {}
                group.over.set()

        with self._turn:
            group.over.clear()
            thread = threading.Thread(target=work, name="transfer", daemon=True)
            thread.start()
            # Each call has its own deadline and sets `over`; the longest way has three.
            group.over.wait(4 * self.options.timeout)
            thread.join(1)
            if thread.is_alive():
                group.abort()
                thread.join(_ABORT_S)
        with self._changed:
            del self._sending[group]
            self._changed.notify_all()
        reason = group.failure or (errors[0] if errors else None)
        if thread.is_alive():
            why = reason or f"it waits for {', '.join(channel.peer for channel in group.channels)}"
            self._error = RunError(f"cannot send version {name}, and cannot leave the transfer: {why}")
            raise self._error
        if reason is not None:
            raise RunError(f"version {name} was not sent: {reason}")

    def _tell(self, group: _Group, error: RunError) -> None:
        """Let the workers of a group know why it ends; those that have left need not know."""
        logger.warning("a server's {} workers are left: {}", group.size, error)
        for channel in group.channels:
            try:
                channel.send({"error": str(error)})
            except ChannelError:
                continue


def open_engine(options: TransferConfig, source: HostSource, client: Any, group: _Group) -> Any:
    """Form the group with vLLM's engine of the type."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    largest = max(tensor.nbytes for tensor in source.tensors.values())
    buffer_bytes = max(_BUFFER_BYTES, largest)
    info: Any
    if isinstance(options, IPCBroadcastConfig):
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=options.host,
            master_port=_free_port(options.host),
            world_size=1 + group.size,
            packed=True,
            packed_buffer_size_bytes=buffer_bytes,
            packed_num_buffers=_BUFFERS,
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=cast("Any", source))


def write_handles(handles: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Make JSON of what `torch.multiprocessing.reductions.reduce_tensor` gives of a uint8 buffer, by GPU: no pickle."""
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
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"weight_broadcast.port: cannot listen on {host}:{port} ({error.strerror or error}); set another port, or "
            "weight_broadcast.host to the address of this machine that inference can reach"
        ) from None


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
