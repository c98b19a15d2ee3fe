"""Receives tensors from the trainer's memory by vLLM's weight transfer, and checks them like files.

vLLM's engines (0.32.0: `nccl`, `ipc`) pass received tensors to `model.load_weights` during a pause. Here they pass them
to a `_Collector` in a separate thread while sampling continues: tensors are copied to host memory, hashed, and then
staged like tensors of files (`worker_weight_update`).

    worker                                   trainer (weight_sync.sender)
    connect, hello {group, rank, workers}
    want {hash of the version}   ------->    waits for all workers of the group
                                 <-------    init    {...}     once: both sides form the NCCL group
                                 <-------    update  {...}     both sides transfer; for ipc once per buffer
    done, or error {reason}      ------->    after each
                                 <-------    finish

The workers of one server form a group. It is reused for every version until an error on either side; then the worker
leaves it, and the next version is requested under another group name.
"""

import base64
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from prime_rl.core.errors import translate_error
from prime_rl.core.ports import join_host_port
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import RawTensor
from prime_rl.storage.wait_for import DeadlineError, start_daemon_future
from prime_rl.storage.weights.transfer_channel import ChannelError, Message, TransferDescriptor, connect

_RECHECK_SECONDS = 0.25
_CONNECT_SECONDS = 30
_CLASSES = {"Tensor": torch.Tensor, "TypedStorage": torch.storage.TypedStorage, "UntypedStorage": torch.UntypedStorage}


class WeightReceiver:
    """Receives versions for one of vLLM's workers."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._membership: _Membership | None = None

    def receive(
        self, request: Mapping[str, Any], hashes: Mapping[str, str], check: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[str, Tensor]]:
        """Fetch the tensors of a version: yields name and tensor, in host memory.

        Args:
            request: the offer's fields, `hash` of the version, `copies` of the model in this server, and `group`, the
                name of the group of its workers, which changes after an error.
            hashes: name -> hash that each tensor must have.
            check: called repeatedly; may raise to stop. A started transfer is received completely and discarded.

        Raises:
            ArtifactError: a tensor is missing, unknown, or has another hash; names it.
            ChannelError: the trainer has ended, or reported an error of another worker.
            DeadlineError: the trainer did not answer in time.
        """
        offer = TransferDescriptor.parse(request)
        with ExitStack() as on_failure:
            on_failure.callback(self.leave)
            member = self._member(offer, request["group"], request["copies"])
            member.channel.send({"want": request["hash"]})
            missing = dict(hashes)

            def verify(name: str, tensor: Tensor) -> None:
                dtype, shape = offer.tensors.get(name, ("", ()))
                data = tensor.reshape(-1).view(torch.uint8).numpy()
                differs = f"tensor {name} from {member.channel.peer} differs from its manifest"
                with translate_error(ValueError, lambda error: ArtifactError(f"{differs}: {error}")):
                    arrived = RawTensor(dtype, shape, data).digest(name)
                if arrived != missing.pop(name, None):
                    raise ArtifactError(f"{differs}: it has another hash")

            yield from member.tensors(verify, check)
            if missing:
                raise ArtifactError(f"{member.channel.peer} did not send tensor {min(missing)} (of {len(missing)})")
            on_failure.pop_all()

    def leave(self) -> None:
        """Leave the group, if the worker is in one."""
        if self._membership is not None:
            self._membership.leave()
        self._membership = None

    def _member(self, offer: TransferDescriptor, group: str, copies: int) -> "_Membership":
        name = (offer.session, group)
        if self._membership is None or self._membership.name != name:
            self.leave()
            self._membership = _Membership(self._worker, offer, name, copies)
        return self._membership


class _Collector:
    """Stands in for the model: passes the tensors that vLLM's engine received to another thread."""

    def __init__(self) -> None:
        self.items: queue.Queue[Any] = queue.Queue(maxsize=2)
        self.discard = threading.Event()

    def load_weights(self, weights: Any) -> None:
        """Copy to the host, on the receiving stream: the next tensors overwrite the buffer of these."""
        for name, tensor in weights:
            self.put((name, tensor.detach().to("cpu", copy=True)))

    def put(self, item: Any) -> None:
        """Queue an item; blocks while the queue is full, until `discard` is set."""
        while not self.discard.is_set():
            with suppress(queue.Full):
                self.items.put(item, timeout=_RECHECK_SECONDS)
                return


class _Membership:
    """A worker's membership of a group: a connection to the trainer, and vLLM's engine for the transfer."""

    def __init__(self, worker: Any, offer: TransferDescriptor, name: tuple[str, str], copies: int) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.name = name  # session and group
        self._type = offer.type
        self._device = worker.device
        self._timeout_seconds = offer.timeout_s
        self._collector = _Collector()
        self._engine: Any = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=offer.type), worker.vllm_config, worker.device, cast("Any", self._collector)
        )
        self._ready = False
        parallel = worker.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        workers = copies * parallel.world_size  # vLLM's own count leaves out independent copies
        trainer = f"the trainer at {join_host_port(offer.host, offer.port)}"
        self.channel = connect(offer.host, offer.port, _CONNECT_SECONDS, trainer)
        sender = f"worker {rank} of inference on {socket.gethostname()} (pid {os.getpid()})"
        self.channel.send(
            {"session": offer.session, "group": name[1], "rank": rank, "workers": workers, "name": sender}
        )

    def tensors(self, verify: Callable[[str, Tensor], None], check: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        """Follow the trainer's commands until it has finished. Raises as `WeightReceiver.receive` and `verify`."""

        def check_unless_forming() -> None:
            # Leaving a group while it is formed would block the other workers in a call without a time-out.
            if self._ready:
                check()

        while True:
            message = _raise_error(self.channel.receive(self._timeout_seconds, check_unless_forming))
            if message["do"] == "init":
                yield from self._run(partial(self._init, message["info"]), verify, check_unless_forming)
                self._ready = True
            elif message["do"] == "update":
                yield from self._run(partial(self._update, message["info"]), verify, check)
            elif self._type == "ipc":
                self._engine.shutdown()  # releases the trainer's buffer
            self.channel.send({"done": True})
            if message["do"] == "finish":
                return

    def leave(self) -> None:
        """Leave the group: abort a transfer in progress and close the connection."""
        self._collector.discard.set()
        self._engine.shutdown()
        self.channel.close()

    def _init(self, info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(info))

    def _update(self, info: dict[str, Any]) -> None:
        if "ipc_handles" in info:
            # JSON of the trainer's `torch.multiprocessing.reductions.reduce_tensor`, by GPU.
            handles = {gpu: tuple(map(_read_argument, each)) for gpu, each in info["ipc_handles"].items()}
            info = {**info, "ipc_handles": handles}
        # Not `update_weights`, which would synchronize the whole device, sampling included.
        self._engine.receive_weights(self._engine.parse_update_info(info))

    def _run(
        self, call: Callable[[], None], verify: Callable[[str, Tensor], None], check: Callable[[], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Run `call`, which may block indefinitely, in a thread, and yield the tensors that it receives.

        After an error the rest is still received, since the transfer of the other workers needs this one. The trainer
        gets the error and reports it to the other workers.
        """

        def work() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a new thread uses the first device otherwise
                call()
            finally:
                self._collector.put(None)

        transfer = start_daemon_future(work, "transfer")
        try:
            for item in self._items(transfer):
                check()
                verify(*item)
                yield item
            transfer.result()
        except BaseException as reason:
            if not isinstance(reason, ChannelError | DeadlineError):
                self._collector.discard.set()
                for _ in self._items(transfer):
                    pass
                self.channel.send({"error": str(reason) or "the received tensors cannot be loaded"})
            raise

    def _items(self, transfer: "Future[None]") -> Iterator[tuple[str, Tensor]]:
        """Yield the items of `transfer` until it ends, or nothing has arrived for `timeout_seconds`."""
        deadline = time.monotonic() + self._timeout_seconds
        while not transfer.done() or not self._collector.items.empty():
            try:
                item = self._collector.items.get(timeout=_RECHECK_SECONDS)
            except queue.Empty:
                if self.channel.has_message():  # during a transfer the trainer sends only errors
                    _raise_error(self.channel.receive(self._timeout_seconds))
                if time.monotonic() > deadline:
                    raise DeadlineError(f"waited {self._timeout_seconds:.0f} s for {self.channel.peer}") from None
                continue
            if item is None:
                return
            deadline = time.monotonic() + self._timeout_seconds
            yield item


def _raise_error(message: Message) -> Message:
    """Raise the error that the trainer reports; return any other message."""
    if "error" in message:
        raise ChannelError(str(message["error"]))
    return message


def _read_argument(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    [(kind, text)] = value.items()
    if kind == "bytes":
        return base64.b64decode(text)
    return _CLASSES[text] if kind == "class" else torch.uint8
