"""Optimizers by name, over groups of parameters. Muon needs full matrices, for any sharding (I9).

Matrices that FSDP sharded by rows are exchanged in groups of as many matrices as ranks: each rank receives one full
matrix, orthogonalises it, and sends the rows back. Each matrix is computed once.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adamw import adamw

from prime_rl.configs.training.optim import AdamWConfig, MuonConfig, OptimConfig, SGDConfig
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.device_mesh import local_tensor

Groups = list[dict[str, Any]]
_EPS = 1e-7


def _adamw(groups: Groups, config: AdamWConfig) -> Optimizer:
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _sgd(groups: Groups, config: SGDConfig) -> Optimizer:
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov and config.momentum > 0)


def _muon(groups: Groups, config: MuonConfig) -> Optimizer:
    muon = config.lr, config.momentum, config.nesterov, config.ns_steps, config.adjust_lr
    return Muon(groups, *muon, (config.beta1, config.beta2), config.eps)


OPTIMIZERS: dict[str, Callable[[Groups, Any], Optimizer]] = {"adamw": _adamw, "sgd": _sgd, "muon": _muon}
"""By `optim.type`."""


def build_optimizer(config: OptimConfig, policy: PolicyModel) -> Optimizer:
    """Build the optimizer over the trained parameters of a sharded policy; `lr` of each group is its peak."""
    return OPTIMIZERS[config.type](parameter_groups(config, policy), config)


def parameter_groups(config: OptimConfig, policy: PolicyModel) -> list[dict[str, Any]]:
    """Group the trained parameters for a torch optimizer by `role`: embedding, unembedding, matrix, vector.

    Each group has `params`, `role`, `lr` (its peak) and `weight_decay`. A tied output head belongs to the embedding.
    """
    embeddings = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    head = policy.causal_lm.get_output_embeddings().weight
    rates = {"embedding": config.embedding_lr, "unembedding": config.unembedding_lr, "matrix": config.matrix_lr}
    members: dict[str, list[nn.Parameter]] = {"matrix": [], "vector": [], "embedding": [], "unembedding": []}
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            role = "embedding"
        elif parameter is head:
            role = "unembedding"
        else:
            role = "matrix" if parameter.ndim >= 2 else "vector"
        members[role].append(parameter)
    for role, rate in rates.items():
        if rate is not None and not members[role]:
            tied = role == "unembedding" and id(head) in embeddings
            reason = "the output head is tied to the embedding" if tied else "no such weights are trained"
            logger.warning(f"optim.{role}_lr has no effect: {reason}")
    return [
        {
            "params": parameters,
            "role": role,
            "lr": config.lr if rates.get(role) is None else rates[role],
            "weight_decay": config.weight_decay if role == "matrix" else 0.0,
        }
        for role, parameters in members.items()
        if parameters
    ]


_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values near 1 (to about 0.7 .. 1.2) and keep the singular vectors.

    The quintic Newton-Schulz iteration of Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
    networks": X <- a X + b (X X^T) X + c (X X^T)^2 X with a, b, c = 3.4445, -4.7750, 2.0315, from X / |X|_F.
    The result is computed in the dtype of the `matrices` [..., m, n], one or a stack of them.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=_EPS).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon(Optimizer):
    """Groups of role `matrix` take the Muon step, all others that of AdamW.

    For a matrix W [m, n] with gradient G, momentum M and weight decay w:

        M <- mu M + (1 - mu) G           U = mu M + (1 - mu) G with Nesterov momentum, else M
        W <- (1 - lr w) W - lr s orthogonalise(U)

    s = 0.2 sqrt(max(m, n)) makes the root mean square of an update that of AdamW's (Liu et al. 2025, "Muon is scalable
    for LLM training", section 2.2); s = sqrt(max(1, m / n)) is Jordan's. A parameter of three dimensions is a stack of
    matrices (the experts of a layer).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        mu: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """`params` are groups of `parameter_groups`."""
        defaults = {"lr": lr, "mu": mu, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr": adjust_lr}
        super().__init__(params, {**defaults, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Take one step; all ranks call it together. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in trained if group["role"] == "matrix" and p.ndim in (2, 3)]
            self._muon(group, matrices)
            known = {id(p) for p in matrices}
            self._adamw(group, [p for p in trained if id(p) not in known])

    def _muon(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        update_of = partial(self._update_of, group)
        for parameter, update in _orthogonalised(parameters, update_of, group["ns_steps"]):
            m, n = parameter.shape[-2:]
            like_adamw = group["adjust_lr"] == "match_rms_adamw"
            scale = 0.2 * math.sqrt(max(m, n)) if like_adamw else math.sqrt(max(1, m / n))
            weight = local_tensor(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.to(weight.device), alpha=-group["lr"] * scale)

    def _update_of(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Advance the momentum of one matrix; return this rank's shard of U, ready to orthogonalise."""
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum, local = local_tensor(state["momentum_buffer"]), local_tensor(gradient)
        momentum.lerp_(local, 1 - group["mu"])
        update = local.lerp(momentum, group["mu"]) if group["nesterov"] else momentum
        # The accelerator, even if FSDP keeps the shards in host memory. Half precision is precise enough for the
        # iteration, but faster only on CUDA.
        on_host = isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type
        device = torch.device(parameter.device_mesh.device_type) if on_host else parameter.device
        return update.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    def _adamw(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        states = [self.state[p] for p in parameters]
        adamw(
            [local_tensor(p) for p in parameters],
            [local_tensor(p.grad) for p in parameters],
            [local_tensor(s["exp_avg"]) for s in states],
            [local_tensor(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            eps=group["eps"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )


def _orthogonalised(
    parameters: list[nn.Parameter], update_of: Callable[[nn.Parameter], Tensor], steps: int
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with this rank's shard of its orthogonalised update.

    Updates are computed lazily, so that at most those of one exchange exist at the same time.
    """
    by_rows: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        axis = _row_shard_axis(parameter)
        if axis is not None:
            by_rows.setdefault((parameter.shape, parameter.device_mesh, axis), []).append(parameter)
        elif _holds_full_matrices(parameter):
            update = update_of(parameter)
            yield parameter, orthogonalise(update, steps) if update.numel() else update
        else:
            yield parameter, _by_gathering(parameter, update_of(parameter), steps)
    for (shape, mesh, axis), members in by_rows.items():
        ranks = mesh.size(axis)
        for some in (members[i : i + ranks] for i in range(0, len(members), ranks)):
            done = _by_exchange([update_of(p) for p in some], shape, mesh.get_group(axis), steps)
            yield from zip(some, done, strict=True)


def _row_shard_axis(parameter: nn.Parameter) -> int | None:
    """Return the mesh dimension that shards the rows of a single matrix, None for any other sharding."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return None
    cut = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return cut[0] if len(cut) == 1 and parameter.placements[cut[0]].is_shard(0) else None


def _holds_full_matrices(parameter: nn.Parameter) -> bool:
    """Whether each rank holds full matrices: nothing is sharded, or a stack is sharded along its first dimension."""
    if not isinstance(parameter, DTensor):
        return True
    cut = [placement for placement in parameter.placements if not placement.is_replicate()]
    return not cut or (parameter.ndim == 3 and all(getattr(placement, "dim", None) == 0 for placement in cut))


def _by_exchange(shards: list[Tensor], shape: torch.Size, group: dist.ProcessGroup, steps: int) -> Iterator[Tensor]:
    """Orthogonalise at most as many matrices as there are ranks, matrix i on rank i, and yield this rank's rows."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows, columns = shape
    rows_per_rank = -(-rows // ranks)  # as torch.chunk splits them
    sizes = [max(0, min(rows_per_rank, rows - r * rows_per_rank)) * columns for r in range(ranks)]
    mine = rank < len(shards)
    sent = [sizes[rank]] * len(shards) + [0] * (ranks - len(shards))
    received = sizes if mine else [0] * ranks
    whole = shards[0].new_empty(sum(received))
    dist.all_to_all_single(whole, torch.cat([s.flatten() for s in shards]), received, sent, group=group)
    done = orthogonalise(whole.view(rows, columns), steps).reshape(-1) if mine else whole
    back = shards[0].new_empty(sum(sent))
    dist.all_to_all_single(back, done, sent, received, group=group)
    yield from (piece.view(-1, columns) for piece in back.split(sent[: len(shards)]))


def _by_gathering(parameter: DTensor, update: Tensor, steps: int) -> Tensor:
    """Orthogonalise the full matrix on every rank: for other layouts than rows, such as tensor parallelism."""
    mesh, placements = parameter.device_mesh, parameter.placements
    layout = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    whole = DTensor.from_local(update, mesh, placements, **layout).full_tensor()
    same = DTensor.from_local(orthogonalise(whole, steps), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return same.redistribute(placements=placements).to_local()
