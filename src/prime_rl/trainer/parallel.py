"""Where the ranks meet: the process group, FSDP2 sharding (I9, I7)."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError, RunError, first_line
from prime_rl.trainer.context_parallel import ContextParallel, check_context_parallel
from prime_rl.trainer.expert_parallel import share_experts
from prime_rl.trainer.layout import Layout, Mesh
from prime_rl.trainer.memory import offload_policy
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.tensor_parallel import share_matrices

Device = Literal["auto", "cpu", "cuda"]

_EXIT_CODES: dict[type[BaseException], int] = {ConfigError: 2, KeyboardInterrupt: 130}  # as run_main gives them


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of one trainer; a lone process is a world of one.

    Attributes:
        rank: this process, 0 leads.
        size: how many there are.
        device: where this rank computes.
        sharers: ranks in a row that work on the same rows of a batch, because they share sequences or matrices.
        timeout_s: longest wait of one rank for another.
    """

    rank: int
    size: int
    device: torch.device
    sharers: int = 1
    timeout_s: float = 600.0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Whose turn it is when rows are dealt; ranks that work on the same rows have the same."""
        return self.rank // self.sharers

    @property
    def data_size(self) -> int:
        """Among how many the rows of a batch are dealt."""
        return self.size // self.sharers

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(values)
        return values

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sum what every rank has counted over its rows, in place; rows that several ranks share count once."""
        return self.sum(values).div_(self.sharers)

    def fail_together(self, error: Exception | None, what: str) -> None:
        """Raise on every rank where one has an error, so that none waits for it in the next collective (I7).

        Raises:
            Exception: `error` itself, on the rank that has it.
            RunError: `what` failed on another rank.
        """
        failed = self.sum(torch.tensor(float(error is not None), device=self.device))
        if error is not None:
            raise error
        if failed.item():
            raise RunError(f"{what} failed on another rank, whose log says why")


@contextmanager
def join_world(device: Device, timeout_s: float, model: TrainerModelConfig | None = None) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, or be a world of one without torchrun.

    Args:
        device: where to compute; auto is cuda where there is one.
        timeout_s: longest wait of one rank for another.
        model: says how the ranks divide the work; by data alone if None.

    Raises:
        ConfigError: cuda is asked for and absent, this node has fewer devices than ranks, the ranks cannot be divided
            as `model` asks for, or somebody else listens where they were to meet.
        RunError: in place of the error of a collective whose other ranks ended or did not answer.
    """
    layout = Layout.of(model or TrainerModelConfig(), int(os.environ.get("WORLD_SIZE", 1)))
    chosen = _choose_device(device)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with lost_ranks_told(timeout_s), _exit_without_peers():
        if "RANK" in os.environ:
            with meeting_told(timeout_s):
                dist.init_process_group(backend, timeout=timeout, **_meeting_place(timeout))
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        yield World(dist.get_rank(), dist.get_world_size(), chosen, layout.sharers, timeout_s)
    # Not reached after an error: the group would wait for ranks that may never come; the process ends anyway.
    dist.destroy_process_group()


def _meeting_place(timeout: timedelta) -> dict[str, Any]:
    """Where the ranks find each other, and never those of an attempt that failed.

    torchrun keeps one store over all attempts, and in it the addresses of ranks that are dead. Each attempt gets a
    part of its own here. Over several nodes it cannot: each node's torchrun counts only the failures of its own ranks.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    return {"store": dist.PrefixStore(f"attempt_{attempt}", store), "rank": rank, "world_size": size}


@contextmanager
def meeting_told(timeout_s: float) -> Iterator[None]:
    """Say in one line why the ranks have not found each other.

    Raises:
        ConfigError: somebody else listens where they were to meet.
        RunError: not all came, or rank 0 is not there.
    """
    try:
        yield
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '?')}"
        if "EADDRINUSE" in str(error):  # torch has no class of its own for it
            raise ConfigError(
                f"the ranks cannot meet at {place} (MASTER_PORT): somebody listens there already; choose another with "
                "torchrun's --master-port, or on one node --standalone"
            ) from error
        raise RunError(
            f"rank {os.environ.get('RANK', 0)} has not met the {os.environ.get('WORLD_SIZE', 1)} ranks at {place} "
            f"within {timeout_s:g} s (dist_timeout_seconds): {first_line(error)}"
        ) from error


@contextmanager
def lost_ranks_told(timeout_s: float) -> Iterator[None]:
    """Turn the error of a collective whose other ranks ended, or did not answer in time, into one line.

    Raises:
        RunError: says which rank found out; torchrun says which one ended first.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo says that it was a collective only by where in its sources it failed.
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        raise RunError(
            f"rank {os.environ.get('RANK', 0)} lost another rank, which ended or did not answer in {timeout_s:g} s: "
            f"its log, and the first failure that torchrun names, say why ({first_line(error)})"
        ) from error


@contextmanager
def _exit_without_peers() -> Iterator[None]:
    """After an error, end the process before the interpreter takes its groups apart.

    That waits for threads that talk to ranks which are gone, and on gloo now and then aborts, which would hide the exit
    code. Handlers registered after this one (W&B's) run all the same.
    """
    code = list[int]()

    def end_at_once() -> None:
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code[0])

    if "RANK" in os.environ:
        atexit.register(end_at_once)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, it goes on to run_main, whose exit code this is
        code.append(_EXIT_CODES.get(type(error), 1))
        raise


def shard(policy: PolicyModel, config: TrainerModelConfig, world: World) -> PolicyModel:
    """Lay the policy out over all ranks, in place: each block sharded by itself, all the rest with the root.

    Embedding, last norm and output head stay with the root, because torch 2.11 silently unties an embedding that is
    sharded by itself. Nothing is read or moved: the parameters may be on the meta device. Gradients are summed over the
    ranks, never averaged, so that parameters on different meshes need no factors of their own.

    Raises:
        ConfigError: the model cannot be divided as `config` asks for.
    """
    layout = Layout.of(config, world.size)
    assert world.sharers == layout.sharers, "this world deals rows for another layout"
    mesh = Mesh(layout, world.device.type, world.timeout_s)
    if mesh.cp is not None:
        check_context_parallel(policy.causal_lm.config.get_text_config(), config, layout.cp)
        policy.context_parallel = ContextParallel(mesh.cp.get_group())
    if mesh.tp is not None:
        share_matrices(policy.causal_lm, mesh.tp)
    dtype = compute_dtype(config.dtype, world.device)
    precision = partial(MixedPrecisionPolicy, param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype))
    share = partial(fully_shard, offload_policy=offload_policy(config))
    # What FSDP is told: into how many parts a block's weights go after the forward pass.
    between = config.reshard_ranks or layout.shard * layout.cp
    reshard = config.reshard_after_forward and (True if between == layout.shard * layout.cp else between)
    if mesh.experts is not None:
        for experts in share_experts(policy.causal_lm, mesh.experts):
            share(experts, mesh=mesh.beside_experts, mp_policy=precision(), reshard_after_forward=bool(reshard))
    for block in policy.blocks:
        share(block, mesh=mesh.data, mp_policy=precision(), reshard_after_forward=reshard)
    # The root's inputs are token ids, temperatures and advantages: casting them to bfloat16 would be wrong.
    share(policy, mesh=mesh.data, mp_policy=precision(cast_forward_inputs=False), reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return policy


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `auto`: bfloat16 on CUDA, float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


def _choose_device(device: Device) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no CUDA device; use device='cpu' or install with --extra gpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"local rank {local_rank} has no GPU of its own: torch sees {count}; start {count} at most")
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen
