"""The process group of the ranks of one trainer, its network interface, and its errors."""

import atexit
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.loopback import is_loopback
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.core.ports import join_host_port
from prime_rl.trainer.parallel.device_mesh import Layout

Device = Literal["auto", "cpu", "cuda"]
Value = TypeVar("Value")
Arrays = dict[str, NDArray[Any]]

_EXIT_CODES: dict[type[BaseException], int] = {ConfigError: 2, KeyboardInterrupt: 130}  # those of run_main
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_MAIN_ADDRESS = "prime_rl/main_address"


_groups: ContextVar[ExitStack | None] = ContextVar("groups", default=None)


@contextmanager
def collect_groups() -> Iterator[ExitStack]:
    """Yield a stack that destroys the groups which the block creates (`World.new_group`); close it if the block raises.

    The sockets of a group otherwise last as long as the process.
    """
    groups = ExitStack()
    token = _groups.set(groups)
    try:
        yield groups
    except BaseException:
        groups.close()
        raise
    finally:
        _groups.reset(token)


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of one trainer; a single process is a world of size 1."""

    rank: int  # rank of this process
    size: int  # number of ranks
    device: torch.device  # the device of this rank
    # number of consecutive ranks that work on the same rows (context and tensor parallelism)
    model_parallel_size: int = 1
    timeout_seconds: float = 600.0  # time limit of collectives

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this rank's rows; ranks that work on the same rows have the same index."""
        return self.rank // self.model_parallel_size

    @property
    def data_size(self) -> int:
        """Number of parts into which the rows of a batch are divided."""
        return self.size // self.model_parallel_size

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(values)
        return values

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place; rows that several ranks process count once."""
        return self.sum(values).div_(self.model_parallel_size)

    def new_group(self) -> dist.ProcessGroup:
        """Create a group of all ranks, for the collectives of another thread. All ranks call it together."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
        if (groups := _groups.get()) is not None:
            groups.callback(dist.destroy_process_group, group)
        return group

    def run_on_all(self, work: Callable[[], Value], what: str) -> Value:
        """Do `work` on every rank and return this rank's result. All ranks raise if it fails on one (I7).

        Raises:
            ConfigError, RunError: as `work`, or that it failed on another rank.
        """
        results, error = list[Value](), None
        try:
            results.append(work())
        except (ConfigError, RunError) as caught:
            error = caught
        self.raise_on_all_ranks(error, what)
        return results[0]

    def raise_on_all_ranks(self, error: Exception | None, what: str) -> None:
        """Raise `error`, and RunError on the other ranks, so that no rank waits in the next collective (I7)."""
        failed = self.sum(torch.tensor(float(error is not None), device=self.device))
        if error is not None:
            raise error
        if failed.item():
            raise RunError(f"{what} failed on another rank; see the log of that rank")


ALONE = World(0, 1, torch.device("cpu"))
"""One rank without a process group, for work that needs no collective."""


class RankConsensus:
    """Runs work with the same result on every rank: an error of one rank is raised on all of them (I7).

    All ranks make the same calls.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None = None) -> None:
        """Communicate over `group`, None is the default one; nothing else may use it at the same time.

        A world of one rank communicates with nothing.
        """
        self._world, self._group = world, group

    def gather(self, work: Callable[[], Value]) -> list[Value]:
        """Do `work` on every rank; return all results by rank, or raise the first rank's error on every rank.

        Raises:
            ConfigError, RunError: as `work`, whose OSError becomes a RunError.
        """
        value, error = None, None
        try:
            value = work()
        except (ConfigError, RunError, OSError) as caught:
            error = RunError(summarize_os_error(caught)) if isinstance(caught, OSError) else caught
        answers: list[Any] = [(value, error)] * self._world.size
        if self._world.size > 1:
            dist.all_gather_object(answers, (value, error), group=self._group)
        first = next((error for _, error in answers if error is not None), None)
        if first is not None:
            raise first
        return [value for value, _ in answers]

    def on_main(self, work: Callable[[], Value]) -> Value:
        """Do `work` on rank 0 alone; return its result, or raise its error, on every rank."""
        return self.gather(lambda: work() if self._world.is_main else None)[0]  # type: ignore[return-value]


class NodeRanks(RankConsensus):
    """The ranks of one node. The first one, with LOCAL_RANK 0, reads files for all of them and is the main rank.

    Attributes:
        is_first: whether this rank is the one that reads.
        is_everyone: whether these are all ranks of the trainer.
    """

    def __init__(self, world: World) -> None:
        """Create the node's group if it has several ranks. All ranks call it together, before groups of some ranks."""
        places = os.environ if world.size > 1 else {}
        local_rank, size = int(places.get("LOCAL_RANK", 0)), int(places.get("LOCAL_WORLD_SIZE", 1))
        ranks = [world.rank - local_rank + one for one in range(size)]
        timeout = timedelta(seconds=world.timeout_seconds)
        group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True) if size > 1 else None
        super().__init__(replace(world, rank=local_rank, size=size), group)
        self._first = ranks[0]
        self.is_first, self.is_everyone = self._world.is_main, size == world.size

    def share(self, read: Callable[[], tuple[Arrays, Value]]) -> tuple[Arrays, Value]:
        """Call `read` on the first rank; return its arrays and its other, small result on all ranks of the node.

        Raises ConfigError or RunError on all of them, as `gather`.
        """
        arrays: Arrays = {}

        def describe() -> tuple[list[tuple[str, str, tuple[int, ...]]], Value]:
            found, result = read()
            arrays.update(found)
            return [(name, array.dtype.str, array.shape) for name, array in found.items()], result

        layout, result = self.on_main(describe)
        for name, dtype, shape in layout if self._world.size > 1 else ():
            if not self.is_first:
                arrays[name] = np.empty(shape, dtype)
            # As bytes, because gloo does not know all types.
            dist.broadcast(torch.from_numpy(arrays[name].reshape(-1).view(np.uint8)), self._first, self._group)
        return arrays, result


@contextmanager
def join_world(device: Device, timeout_seconds: float, model: TrainerModelConfig | None = None) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment; without torchrun, a world of size 1.

    Device "auto" is cuda if available. `model` contains the layout of the ranks; None is data parallelism alone.

    Raises:
        ConfigError: no CUDA device for this rank or an old one, a layout that does not fit the number of ranks, or a
            port in use.
        RunError: another rank exited, or a collective exceeded `timeout_seconds`.
    """
    layout = Layout.of(model or TrainerModelConfig(), int(os.environ.get("WORLD_SIZE", 1)))
    chosen = _choose_device(device)
    if chosen.type == "cuda" and model is not None:
        _check_capability(chosen, model.dtype)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    with wrap_rank_errors(timeout_seconds), _exit_without_peers():
        if "RANK" in os.environ:
            with wrap_rank_errors(timeout_seconds, joining=True):
                dist.init_process_group(backend, timeout=timeout, **_rendezvous_options(timeout))
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        yield World(dist.get_rank(), dist.get_world_size(), chosen, layout.model_parallel_size, timeout_seconds)
    # Not reached after an error: destroying the group would wait for ranks that may have exited.
    dist.destroy_process_group()


def _rendezvous_options(timeout: timedelta) -> dict[str, Any]:
    """Return torchrun's store, on one node with a prefix for this restart attempt.

    torchrun uses one store for all attempts, which then holds addresses of dead ranks. On several nodes the prefix is
    not possible: each node's torchrun counts only the failures of its own ranks.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None:
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        prefix = f"attempt_{attempt}"
    else:
        prefix = "several_nodes"
        choose_gloo_interface(store, rank, size)
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": size}


@contextmanager
def wrap_rank_errors(timeout_seconds: float, joining: bool = False) -> Iterator[None]:
    """Convert an error of the rendezvous (`joining`), or of a collective that lost another rank, to one line.

    Raises:
        ConfigError: another process listens on the port, or `deterministic` is set and an operation is not.
        RunError: not all ranks joined, another rank exited, or it timed out; torchrun names the rank that exited first.
    """
    try:
        yield
    except RuntimeError as error:
        rank, said = f"rank {os.environ.get('RANK', 0)}", summarize_exception(error)
        if "use_deterministic_algorithms" in str(error):
            raise ConfigError(f"deterministic = true is not possible with these settings; remove it: {said}") from error
        if joining and isinstance(error, dist.DistError):
            place = join_host_port(os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "?"))
            if "EADDRINUSE" in str(error):  # torch raises the same class for all causes
                raise ConfigError(
                    f"the ranks cannot use {place} (MASTER_PORT): another process listens there; choose another port "
                    "with torchrun's --master-port, or use --standalone on one node"
                ) from error
            raise RunError(
                f"{rank} did not join the {os.environ.get('WORLD_SIZE', 1)} ranks at {place} "
                f"within {timeout_seconds:g} s (dist_timeout_seconds): {said}"
            ) from error
        # Only the source path in the message identifies an error of gloo.
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            raise RunError(
                f"{rank} lost another rank, which exited or did not respond in {timeout_seconds:g} s; "
                f"see its log and the first failure that torchrun reports ({said})"
            ) from error
        raise


@contextmanager
def _exit_without_peers() -> Iterator[None]:
    """After an error, exit before the interpreter destroys the process groups.

    Destroying them waits for threads that are connected to dead ranks. With gloo it sometimes aborts the process, which
    would hide the exit code. Handlers that are registered later (W&B's) still run.
    """
    code = list[int]()

    def exit_now() -> None:
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code[0])

    if "RANK" in os.environ:
        atexit.register(exit_now)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # raised again for run_main, which uses the same exit codes
        code.append(_EXIT_CODES.get(type(error), 1))
        raise


def device_type(device: Device) -> Literal["cpu", "cuda"]:
    """Return the type of the device of each rank: "auto" is cuda if available."""
    return "cpu" if device == "cpu" or (device == "auto" and not torch.cuda.is_available()) else "cuda"


def _choose_device(device: Device) -> torch.device:
    if device_type(device) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no CUDA device; use device='cpu' or install with --extra gpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch sees {count}; start at most {count} ranks per node"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def _check_capability(device: torch.device, dtype: str) -> None:
    capability = torch.cuda.get_device_capability(device)
    if dtype != "float32" and capability < (8, 0):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; bfloat16 "
            "and flash attention need 8.0 (Ampere) or newer; set model.dtype='float32'"
        )


def choose_gloo_interface(store: dist.Store, rank: int, size: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that the other nodes reach, if gloo would use the loopback interface.

    gloo listens on the address to which the host name resolves. Debian's /etc/hosts has `127.0.1.1 NAME`, so the ranks
    of other nodes could not connect.

    The nodes are those of torchrun, at least two. On the first node it is the interface with the address by which the
    last rank reaches this node, on the others that of the route to the first one.
    """
    main = os.environ["MASTER_ADDR"]
    if rank == size - 1:
        store.set(_MAIN_ADDRESS, str(socket.getaddrinfo(main, None)[0][4][0]))
    if _GLOO_INTERFACE in os.environ or not _has_loopback_name():
        return
    own = store.get(_MAIN_ADDRESS).decode() if os.environ["GROUP_RANK"] == "0" else _address_towards(main)
    for interface, addresses in psutil.net_if_addrs().items():
        if own in (address.address for address in addresses):
            os.environ[_GLOO_INTERFACE] = interface


def _has_loopback_name() -> bool:
    """Whether the name of this host is unknown, or resolves to the loopback interface."""
    try:
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    except OSError:
        return True
    return is_loopback(str(address))


def _address_towards(host: str) -> str:
    """Return the address of this node on the route to another one."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
