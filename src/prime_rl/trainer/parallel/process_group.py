"""The process group of the ranks of one trainer, and its errors."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.ports import join_host_port
from prime_rl.trainer.parallel.device_mesh import Layout
from prime_rl.trainer.parallel.gloo_interface import choose_gloo_interface

Device = Literal["auto", "cpu", "cuda"]

_EXIT_CODES: dict[type[BaseException], int] = {ConfigError: 2, KeyboardInterrupt: 130}  # those of run_main


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of one trainer; a single process is a world of size 1."""

    rank: int  # rank of this process
    size: int  # number of ranks
    device: torch.device  # the device of this rank
    # number of consecutive ranks that work on the same rows (context and tensor parallelism)
    model_parallel_size: int = 1
    timeout_s: float = 600.0  # time limit of collectives

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

    def raise_on_all_ranks(self, error: Exception | None, what: str) -> None:
        """Raise `error`, and RunError on the other ranks, so that no rank waits in the next collective (I7)."""
        failed = self.sum(torch.tensor(float(error is not None), device=self.device))
        if error is not None:
            raise error
        if failed.item():
            raise RunError(f"{what} failed on another rank; see the log of that rank")


@contextmanager
def join_world(device: Device, timeout_s: float, model: TrainerModelConfig | None = None) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment; without torchrun, a world of size 1.

    Device "auto" is cuda if available. `model` contains the layout of the ranks; None is data parallelism alone.

    Raises:
        ConfigError: no CUDA device for this rank, a layout that does not fit the number of ranks, or a port in use.
        RunError: another rank exited, or a collective exceeded `timeout_s`.
    """
    layout = Layout.of(model or TrainerModelConfig(), int(os.environ.get("WORLD_SIZE", 1)))
    chosen = _choose_device(device)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with wrap_rank_errors(timeout_s), _exit_without_peers():
        if "RANK" in os.environ:
            with wrap_rank_errors(timeout_s, joining=True):
                dist.init_process_group(backend, timeout=timeout, **_rendezvous_options(timeout))
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        yield World(dist.get_rank(), dist.get_world_size(), chosen, layout.model_parallel_size, timeout_s)
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
def wrap_rank_errors(timeout_s: float, joining: bool = False) -> Iterator[None]:
    """Convert an error of the rendezvous (`joining`), or of a collective that lost another rank, to one line.

    Raises:
        ConfigError: another process listens on the port.
        RunError: not all ranks joined, another rank exited, or it timed out; torchrun names the rank that exited first.
    """
    try:
        yield
    except RuntimeError as error:
        rank, said = f"rank {os.environ.get('RANK', 0)}", summarize_exception(error)
        if joining and isinstance(error, dist.DistError):
            place = join_host_port(os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "?"))
            if "EADDRINUSE" in str(error):  # torch raises the same class for all causes
                raise ConfigError(
                    f"the ranks cannot use {place} (MASTER_PORT): another process listens there; choose another port "
                    "with torchrun's --master-port, or use --standalone on one node"
                ) from error
            raise RunError(
                f"{rank} did not join the {os.environ.get('WORLD_SIZE', 1)} ranks at {place} within {timeout_s:g} s "
                f"(dist_timeout_seconds): {said}"
            ) from error
        # Only the source path in the message identifies an error of gloo.
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            raise RunError(
                f"{rank} lost another rank, which exited or did not respond in {timeout_s:g} s; see its log and the "
                f"first failure that torchrun reports ({said})"
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
