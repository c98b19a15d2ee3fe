"""I5 in a worker: tensors that come from the trainer's memory, by vLLM's own weight transfer, checked like files.

vLLM's engines (0.32.0: `nccl`, `ipc`) hand what they receive to `model.load_weights` while nothing is sampled. Ours
gets a `_Collector` in the place of the model, in a thread of its own while sampling goes on: tensors come to host
memory, are hashed there, and go the way of those that were read from files (`switch`).

    worker                                   trainer (publication.sending)
    connect, hello {group, rank, of how many}
    want {hash of the version}   ------->    waits for all workers of the group
                                 <-------    init    {...}     once: both sides form the NCCL group
                                 <-------    update  {...}     both sides transfer; for ipc once a buffer
    done, or error {why}         ------->    after each
                                 <-------    finish

A group of workers is that of one server. It lives from version to version, until something fails on either side: then
it is left and the next version is asked for under another name. I7: what blocks runs in a thread that is not waited
for longer than `timeout_s`, and no longer than the trainer lives; the group is aborted then.
"""

import base64
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from prime_rl.inference.reading import Cancelled
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.channel import ChannelError, Message, connect
from prime_rl.run.offer import Offer
from prime_rl.run.tensors import RawTensor
from prime_rl.run.wait import DeadlineError

_RECHECK_S = 0.25
_CONNECT_S = 30
_CLASSES = {"Tensor": torch.Tensor, "TypedStorage": torch.storage.TypedStorage, "UntypedStorage": torch.UntypedStorage}


class Receiver:
    """One worker's way to the trainer.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._joined: _Membership | None = None

    def receive(
        self,
        request: Mapping[str, Any],
        hashes: Mapping[str, str],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Fetch the tensors of a version.

        Args:
            request: the offer's fields, `hash` of the version, `copies` of the model in this server, and `group`: the
                name under which all its workers ask; another one after a failure.
            hashes: name -> hash that each tensor must have.
            cancelled: asked again and again. A transfer that has begun is received to its end and thrown away.

        Yields:
            Name and tensor, in host memory of its own.

        Raises:
            ArtifactError: a tensor is missing, unknown, or has another hash; names it.
            ChannelError: the trainer has ended, or says what went wrong at another worker.
            DeadlineError: it did not answer in time.
            Cancelled: `cancelled` was true.
        """
        offer = Offer.parse(request)
        complete = False
        try:
            member = self._member(offer, request["group"], request["copies"])
            member.channel.send({"want": request["hash"]})
            missing = dict(hashes)

            def check(name: str, tensor: Tensor) -> None:
                _check(name, tensor, offer, missing.pop(name, None), member.channel.peer)

            yield from member.tensors(check, cancelled)
            if missing:
                raise ArtifactError(f"{member.channel.peer} did not send tensor {min(missing)} (of {len(missing)})")
            complete = True
        finally:
            if not complete:
                self.leave()

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._joined is not None:
            self._joined.leave()
        self._joined = None

    def _member(self, offer: Offer, group: str, copies: int) -> "_Membership":
        name = (offer.session, group)
        if self._joined is None or self._joined.name != name:
            self.leave()
            self._joined = _Membership(self._worker, offer, name, copies)
        return self._joined


class _Collector:
    """What vLLM's engine takes for the model: hands on what it gets, to a thread that may not want it any more."""

    def __init__(self) -> None:
        self.items: queue.Queue[Any] = queue.Queue(maxsize=2)
        self.unwanted = threading.Event()

    def load_weights(self, weights: Any) -> None:
        """Copy to the host, on the stream that received: the buffer behind these tensors is filled again."""
        for name, tensor in weights:
            self.put((name, tensor.detach().to("cpu", copy=True)))

    def put(self, item: Any) -> None:
        """Hand an item over."""
        while not self.unwanted.is_set():
            try:
                self.items.put(item, timeout=_RECHECK_S)
                return
            except queue.Full:
                continue


class _Membership:
    """This worker's place in a group: a connection to the trainer, and vLLM's engine for what it sends.

    Attributes:
        name: session and group.
        channel: to the trainer.
    """

    def __init__(self, worker: Any, offer: Offer, name: tuple[str, str], copies: int) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.name = name
        self._type = offer.type
        self._device = worker.device
        self._timeout_s = offer.timeout_s
        self._collector = _Collector()
        self._engine: Any = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=offer.type), worker.vllm_config, worker.device, cast("Any", self._collector)
        )
        self._ready = False
        parallel = worker.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        workers = copies * parallel.world_size  # where copies are independent, vLLM tells each that it is the only one
        trainer = f"the trainer at {offer.host}:{offer.port}"
        self.channel = connect(offer.host, offer.port, _CONNECT_S, trainer)
        me = f"worker {rank} of inference on {socket.gethostname()} (pid {os.getpid()})"
        self.channel.send({"session": offer.session, "group": name[1], "rank": rank, "workers": workers, "name": me})

    def tensors(
        self, check: Callable[[str, Tensor], None], cancelled: Callable[[], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Do what the trainer says until it has finished; raises as `Receiver.receive`, and what `check` raises."""

        def stop() -> None:
            # Who leaves a group that is being formed leaves the others in a call that nothing can end.
            if self._ready and cancelled():
                raise Cancelled("it is overtaken")

        while True:
            message = _told(self.channel.receive(self._timeout_s, stop))
            if message["do"] == "init":
                yield from self._run(partial(self._init, message["info"]), check, lambda: False)
                self._ready = True
            elif message["do"] == "update":
                yield from self._run(partial(self._update, message["info"]), check, cancelled)
            elif self._type == "ipc":
                self._engine.shutdown()  # gives the trainer's buffer back
            self.channel.send({"done": True})
            if message["do"] == "finish":
                return

    def leave(self) -> None:
        """Abort what goes on in the group, and hang up."""
        self._collector.unwanted.set()
        self._engine.shutdown()
        self.channel.close()

    def _init(self, info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(info))

    def _update(self, info: dict[str, Any]) -> None:
        if "ipc_handles" in info:
            info = {**info, "ipc_handles": _read_handles(info["ipc_handles"])}
        # Not `update_weights`, which would wait for all that the device does, sampling included.
        self._engine.receive_weights(self._engine.parse_update_info(info))

    def _run(
        self, call: Callable[[], None], check: Callable[[str, Tensor], None], cancelled: Callable[[], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Run what may block for ever in a thread, and yield what it delivers.

        Whoever stops listening early first receives the rest: the other workers need this one for that. What went wrong
        is told to the trainer, who tells the others.
        """
        errors = list[Exception]()

        def work() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a thread begins with the first one
                call()
            except Exception as error:  # noqa: BLE001  raised again by the thread that listens
                errors.append(error)
            self._collector.put(None)

        thread = threading.Thread(target=work, name="transfer", daemon=True)
        thread.start()
        try:
            for item in self._items(thread):
                if cancelled():
                    raise Cancelled("it is overtaken")
                check(*item)
                yield item
            if errors:
                raise errors[0]
        except (ChannelError, DeadlineError):
            raise
        except BaseException as reason:
            self._collector.unwanted.set()
            for _ in self._items(thread):
                pass
            self.channel.send({"error": str(reason) or "it cannot load what it has received"})
            raise

    def _items(self, thread: threading.Thread) -> Iterator[tuple[str, Tensor]]:
        """Yield what `thread` hands over, to its end or that of the trainer's patience."""
        deadline = time.monotonic() + self._timeout_s
        while thread.is_alive() or not self._collector.items.empty():
            try:
                item = self._collector.items.get(timeout=_RECHECK_S)
            except queue.Empty:
                if self.channel.has_news():  # in the middle of a call the trainer only speaks to say that it is over
                    _told(self.channel.receive(self._timeout_s))
                if time.monotonic() > deadline:
                    raise DeadlineError(f"waited {self._timeout_s:.0f} s for {self.channel.peer}") from None
                continue
            if item is None:
                return
            deadline = time.monotonic() + self._timeout_s
            yield item


def _told(message: Message) -> Message:
    """Raise the error that the trainer tells."""
    if "error" in message:
        raise ChannelError(str(message["error"]))
    return message


def _check(name: str, tensor: Tensor, offer: Offer, digest: str | None, trainer: str) -> None:
    dtype, shape = offer.tensors.get(name, ("", ()))
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    try:
        arrived = RawTensor(dtype, shape, data).digest(name)
    except ValueError as error:
        raise ArtifactError(f"tensor {name} from {trainer} is not what was published: {error}") from None
    if digest is None or arrived != digest:
        raise ArtifactError(f"tensor {name} from {trainer} is not what was published: it has another hash")


def _read_handles(handles: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    """Make of JSON what `torch.multiprocessing.reductions.reduce_tensor` gave the trainer, by GPU."""
    return {gpu: tuple(_read_argument(argument) for argument in arguments) for gpu, arguments in handles.items()}


def _read_argument(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    [(kind, text)] = value.items()
    if kind == "bytes":
        return base64.b64decode(text)
    return _CLASSES[text] if kind == "class" else torch.uint8
