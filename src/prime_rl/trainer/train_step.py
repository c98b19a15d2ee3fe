"""Forward, backward and update of one step, shared by reinforcement learning and supervised fine-tuning.

Gradients are reduced, measured and clipped on any meshes (I9); their norms are also reported by block and by role of
the parameters. The learning rate schedule is one factor per step, multiplied with the peak rate of every group.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from prime_rl.configs.training.optim import SchedulerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.device_mesh import local_tensor
from prime_rl.trainer.parallel.process_group import World

_MAX_SKIPPED_STEPS = 3

WeightedSum = tuple[Tensor, Tensor]
"""A sum and the count that divides it, scalars."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Divisors of the parts of a loss, counted over the rows of all ranks, before any mask that a loss adds (I9)."""

    tokens: int  # trained tokens, at least 1; with `rl_weights`, those whose weight is not 0
    sequences: int = 1  # samples, trained on or not, at least 1
    ce_tokens: int = 1  # trained tokens whose `ce_weights` is not 0, at least 1
    ref_kl_tokens: int = 1  # trained tokens whose `ref_kl_weights` is not 0, at least 1


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The data of one optimizer step."""

    rows: Sequence[MicroBatch]  # this rank's micro-batches; every rank has the same number, at least one
    counts: Counts  # over the rows of all ranks


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row after the forward pass."""

    row: MicroBatch  # the micro-batch, on the device
    logprobs: Tensor  # float32 [T], differentiable, 0 outside the mask
    entropy: Tensor  # float32 [T], 0 outside the mask
    before_first_update: bool  # no optimizer step was taken yet in this step
    counts: Counts  # of the row's minibatch, over all ranks
    # bool [T], tokens that the policy's own top-k, top-p and min-p would remove; None where sampling was not
    # truncated
    outside_sampling_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """Result of an objective for one row."""

    # scalar, the row's part of the minibatch's loss: summed over its tokens, divided by `ScoredRow.counts`
    loss: Tensor
    means: dict[str, WeightedSum]  # sums and counts of the reported metrics; the same names for every row
    parts: dict[str, Tensor] = field(default_factory=dict)  # parts of `loss`, if it has several; the same names too


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, equal on all ranks."""

    loss: float | None  # mean over the minibatches; None if all were skipped
    grad_norm: float | None  # mean over the minibatches of the norm before clipping; None if all were skipped
    skipped: int  # number of minibatches without an update, because their gradient or loss was not finite
    means: dict[str, float | None]  # metrics of the objective and of the use of experts; None where nothing was counted
    rates: dict[str, float]  # the learning rates of the step, `lr` and `lr/<role>`
    layer_norms: dict[str, float] = field(default_factory=dict)  # as `grad_norm`, by layer and role; {} if not due


class MetricAccumulator:
    """Running sums and counts by name, over rows and ranks. Every rank must add the same names."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, WeightedSum]) -> None:
        """Add sums and counts; they stay on the device, so nothing is synchronised."""
        for name, pair in values.items():
            total = torch.stack([x.detach().double() for x in pair])
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    def reduce(self, world: World) -> dict[str, float | None]:
        """Sum over all ranks and divide; None where nothing was counted or the mean is not finite."""
        names = sorted(self._totals)
        if not names:
            return {}
        totals = world.sum_rows(torch.stack([self._totals[name] for name in names])).tolist()
        means = [total / count if count else math.nan for total, count in totals]
        return {name: mean if math.isfinite(mean) else None for name, mean in zip(names, means, strict=True)}


class TrainStep:
    """Forward, backward and update over minibatches of packed rows.

    Gradients are summed over ranks, never averaged: the objective divides by counts over all ranks (I9).

    Attributes:
        synchronize_seconds: how long this rank waited for the slowest one after the backward passes of the last step.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        world: World,
        max_norm: float | None,
        on_row: Callable[[], None] = lambda: None,
        reduce_once: bool = False,
    ) -> None:
        """Store the parts of a step.

        A gradient norm `max_norm` None does not clip; `on_row` is called after every micro-batch; `reduce_once` reduces
        gradients over ranks once per minibatch, not once per row (`set_gradient_reduction`).
        """
        self._policy, self._optimizer, self._world, self._on_row = policy, optimizer, world, on_row
        self._reduce_once = reduce_once
        self._max_norm = float("inf") if max_norm is None else max_norm
        self._rates = LearningRates(optimizer)
        self._skipped_steps = 0
        self._entropies = EntropyQuantiles()
        self.synchronize_seconds = 0.0

    def step(
        self,
        minibatches: Sequence[Minibatch],
        objective: Callable[[ScoredRow], Objective],
        factor: float,
        layer_norms: bool = False,
    ) -> StepResult:
        """Take one optimizer step per minibatch, all at `factor` times the peak rates. All ranks call it together.

        With `layer_norms`, the result has the gradient norm of each layer and role.

        Raises:
            ConfigError: a row has tokens or positions outside the model's range.
            RunError: three steps in a row took no update, because every gradient was non-finite (I10).
        """
        self.begin(objective, factor, layer_norms)
        for minibatch in minibatches:
            for i, row in enumerate(minibatch.rows):
                set_gradient_reduction(self._policy, last=i == len(minibatch.rows) - 1, once=self._reduce_once)
                scored = self.forward(row, minibatch.counts, before_first_update=not self.has_updated)
                self.add(scored).backward()
                self._on_row()
            self.update()
        return self.finish()

    def begin(self, objective: Callable[[ScoredRow], Objective], factor: float, layer_norms: bool = False) -> None:
        """Begin a step as `step` does: `forward`, `add` and backward for each row, `update` per minibatch, `finish`."""
        self._objective, self._applied_rates = objective, self._rates.apply(factor)
        self._means, self._losses, self._norms = MetricAccumulator(), list[float | None](), list[float]()
        self._by_layer = list[dict[str, float]]() if layer_norms else None
        self._parts: dict[str, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self.synchronize_seconds = 0.0

    @property
    def has_updated(self) -> bool:
        """Whether an update was applied in the step in progress."""
        return bool(self._norms)

    def add(self, scored: ScoredRow) -> Tensor:
        """Return the loss of a scored row; count its metrics."""
        result = self._objective(scored)
        self._entropies.add(scored.entropy, scored.row.loss_mask)
        self._loss += result.loss.detach()
        self._means.add(result.means)
        for name, part in result.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + part.detach().double()
        return result.loss

    def update(self) -> None:
        """Apply the minibatch's gradient, which the ranks hold summed, if it is finite. All ranks call it together."""
        loss = self._sum_loss()
        if self._by_layer is not None:
            self._by_layer.append(layer_gradient_norms(self._policy, self._world))
        norm = self._update(loss)
        self._losses.append(None if norm is None else loss)
        if norm is not None:
            self._norms.append(norm)

    def finish(self) -> StepResult:
        """Return the result of a step. All ranks call it together. Raises RunError as `step`."""
        losses, norms = [loss for loss in self._losses if loss is not None], self._norms
        self._skipped_steps = 0 if norms else self._skipped_steps + 1
        if self._skipped_steps >= _MAX_SKIPPED_STEPS:
            raise RunError(
                f"the gradient was not finite in {_MAX_SKIPPED_STEPS} consecutive steps; lower optim.lr, or check the "
                "batches for non-finite logprobs or advantages"
            )
        # Means over the minibatches, as `loss`: the ranks' counts add up to the number of minibatches.
        share = len(self._losses) / self._world.data_size
        self._means.add({f"loss/{name}": (part, torch.full_like(part, share)) for name, part in self._parts.items()})
        by_layer = self._by_layer or [{}]
        return StepResult(
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=sum(norms) / len(norms) if norms else None,
            skipped=len(self._losses) - len(losses),
            means=self._means.reduce(self._world)
            | self._entropies.reduce(self._world)
            | self._policy.reduce_routing(self._world.sum, self._world.device),
            rates=self._applied_rates,
            layer_norms={name: sum(norms[name] for norms in by_layer) / len(by_layer) for name in by_layer[0]},
        )

    @torch.no_grad()
    def evaluate(self, minibatch: Minibatch, objective: Callable[[ScoredRow], Objective]) -> float:
        """Compute the loss of a minibatch without an update. All ranks call it together."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for row in minibatch.rows:
            total += objective(self.forward(row, minibatch.counts, before_first_update=True)).loss
            self._on_row()
        reshard_policy(self._policy)
        return self._world.sum_rows(total).item()

    def _sum_loss(self) -> float:
        """Return the minibatch's loss over all ranks."""
        if self._world.device.type == "cuda":  # reading the loss below would wait for the backward pass anyway
            torch.cuda.current_stream(self._world.device).synchronize()
        start = time.perf_counter()
        loss, self._loss = self._world.sum_rows(self._loss).item(), torch.zeros_like(self._loss)
        self.synchronize_seconds += time.perf_counter() - start
        return loss

    def forward(self, row: MicroBatch, counts: Counts, before_first_update: bool) -> ScoredRow:
        """Score a row of the minibatch whose counts over all ranks are `counts`."""
        self._policy.check_row(row)
        row = row.to(self._world.device)
        logprobs, entropy, *outside_sampling_mask = self._policy(row)
        return ScoredRow(row, logprobs, entropy, before_first_update, counts, *outside_sampling_mask)

    def _update(self, loss: float) -> float | None:
        """Clip the gradient and apply it; return its norm before clipping, None if it or the loss is not finite."""
        norm = gradient_norm(self._policy.parameters(), self._world)
        usable = math.isfinite(norm) and math.isfinite(loss)
        if usable:
            if norm > self._max_norm:
                gradients = [local_tensor(gradient) for gradient in _gradients(self._policy.parameters())]
                torch._foreach_mul_(gradients, self._max_norm / (norm + 1e-6))
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm if usable else None


def set_gradient_reduction(policy: nn.Module, last: bool, once: bool) -> None:
    """Choose how the next backward pass, the `last` before the optimizer step or not, reduces its gradients.

    Every pass reduces them over the shards, and the last pass also over the replicas. With `once` only the last pass
    reduces, and until then each rank holds whole gradients.
    """
    assert isinstance(policy, FSDPModule)
    policy.set_requires_gradient_sync(last or not once)
    policy.set_requires_all_reduce(last)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], world: World) -> float:
    """Return the 2-norm of all gradients, equal on all ranks; elements that several ranks hold count once."""
    held: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        local = local_tensor(gradient)
        held[num_copies(gradient, world), local.device].append(local)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (holders, _), gradients in held.items():
        total += get_total_norm(gradients).to(total).square_() / holders
    return world.sum(total).sqrt_().item()


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def num_copies(gradient: Tensor, world: World) -> int:
    """Return the number of ranks that hold the same elements."""
    if not isinstance(gradient, DTensor):
        return world.size
    placed = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    parts = [size for size, placement in placed if not placement.is_replicate()]
    return world.size // torch.Size(parts).numel()


_ROLES = {
    "adapter": ("lora",),
    "norm": ("norm",),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "moe", "expert", "feed_forward"),
}
"""Role of a parameter in a block -> parts of its name; the first match counts."""


@torch.no_grad()
def layer_gradient_norms(policy: PolicyModel, world: World) -> dict[str, float]:
    """Return `grad_norm/layer_<n>` and `grad_norm/<role>`, 2-norms over all ranks. All ranks call it together.

    The squares of either kind add up to the square of `gradient_norm`, except that only blocks are layers.
    """
    names = list[str]()
    indices, members = dict[str, int](), dict[int, list[int]]()
    for parameter, groups in _norm_groups(policy):
        for group in groups:
            if group not in indices:
                indices[group] = len(names)
                names.append(group)
        members[id(parameter)] = [indices[group] for group in groups]
    totals = torch.zeros(len(names), dtype=torch.float64, device=world.device)
    held: dict[torch.device, list[tuple[Tensor, int, list[int]]]] = defaultdict(list)
    for parameter in policy.parameters():
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            held[local.device].append((local, num_copies(parameter.grad, world), members[id(parameter)]))
    for entries in held.values():
        norms = torch._foreach_norm([local for local, _, _ in entries], 2, dtype=torch.float32)
        squares = torch.stack(list(norms)).to(totals).square()
        squares /= torch.tensor([copies for _, copies, _ in entries], dtype=torch.float64).to(totals)
        where = [(index, entry) for entry, (_, _, groups) in enumerate(entries) for index in groups]
        targets, sources = torch.tensor(where, device=totals.device).T
        totals.index_add_(0, targets, squares[sources])
    values = world.sum(totals).sqrt_().tolist()
    return {f"grad_norm/{name}": value for name, value in zip(names, values, strict=True)}


def _norm_groups(policy: PolicyModel) -> list[tuple[nn.Parameter, list[str]]]:
    """Return the trained parameters and the layer and role of each."""
    layers = {id(p): index for index, block in enumerate(policy.blocks) for p in block.parameters()}
    embeddings = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    head = policy.causal_lm.get_output_embeddings().weight
    found = []
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        groups = [f"layer_{layers[id(parameter)]}"] if id(parameter) in layers else []
        if id(parameter) in embeddings:
            role = "embedding"
        elif parameter is head:
            role = "unembedding"
        else:
            role = next((role for role, parts in _ROLES.items() if any(part in name for part in parts)), "other")
        found.append((parameter, [*groups, role]))
    return found


ENTROPY_QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
"""Name of the metric -> share of the tokens."""
_ENTROPY_BINS = 4096
_MAX_ENTROPY = 16.0
"""Above the entropy of a uniform distribution over nine million tokens, in nats."""


class EntropyQuantiles:
    """Counts entropies in bins whose edges grow quadratically, because most tokens are almost certain.

    The error is below 0.0002 nats at 0.01 nats, and below 0.008 nats everywhere.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.no_grad()
    def add(self, entropy: Tensor, mask: Tensor) -> None:
        """Add the entropies [T] of a row where `mask` [T] is set; nothing is read from the device."""
        roots = entropy.float().clamp(0.0, _MAX_ENTROPY).sqrt()
        bins = (roots * (_ENTROPY_BINS / math.sqrt(_MAX_ENTROPY))).clamp(max=_ENTROPY_BINS - 1).long()
        bins = torch.where(mask & roots.isfinite(), bins, _ENTROPY_BINS)  # others are not counted
        counts = bins.new_zeros(_ENTROPY_BINS + 1).scatter_add_(0, bins, torch.ones_like(bins))[:-1].double()
        self._counts = counts if self._counts is None else self._counts + counts

    def reduce(self, world: World) -> dict[str, float | None]:
        """Return `entropy/<quantile>` over all ranks, None without tokens; start again. All ranks call it together."""
        if self._counts is None:
            return {}
        totals, self._counts = world.sum_rows(self._counts).cpu().cumsum(0), None
        return {f"entropy/{name}": _quantile(totals, share) for name, share in ENTROPY_QUANTILES.items()}


def _quantile(totals: Tensor, share: float) -> float | None:
    """Return the entropy below which `share` of the tokens are, linear within its bin."""
    target = share * totals[-1].item()
    if not totals[-1].item():
        return None
    index = int((totals < target).sum())
    below = totals[index - 1].item() if index else 0.0
    inside = totals[index].item() - below
    position = index + ((target - below) / inside if inside else 0.0)
    return (position / _ENTROPY_BINS) ** 2 * _MAX_ENTROPY


def schedule_factor(config: SchedulerConfig, peak: float, step: int, max_steps: int | None) -> float:
    """Compute the factor of all configured rates at step `step` (from 0).

    Warm-up rises linearly and reaches `scheduler.factor` at step `warmup_steps`. Decay (linear or cosine) fills the
    last `decay_steps` steps, or all after the warm-up, and would reach `min_lr / peak` at step `max_steps`. `peak` is
    `optim.lr`. Raises ConfigError if the schedule decays and `max_steps` is not set.
    """
    if step < config.warmup_steps:
        return config.factor * (step + 1) / (config.warmup_steps + 1)
    if config.type == "constant":
        return config.factor
    if max_steps is None:
        raise ConfigError(f"scheduler.type={config.type!r} needs max_steps to know where the decay ends")
    length = max_steps - config.warmup_steps if config.decay_steps is None else config.decay_steps
    begin = max(config.warmup_steps, max_steps - length)
    done = min(1.0, max(0, step - begin) / max(1, max_steps - begin))
    left = 1 - done if config.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    floor = config.min_lr / peak if peak else 0.0
    return floor + (config.factor - floor) * left


def warn_if_warmup_exceeds_run(config: SchedulerConfig, max_steps: int | None) -> None:
    """Log a warning if the run ends during the warm-up."""
    if max_steps is not None and config.warmup_steps > max_steps:
        logger.warning(
            f"scheduler.warmup_steps = {config.warmup_steps} is more than max_steps = {max_steps}: the learning rate "
            "never reaches optim.lr"
        )


class LearningRates:
    """Applies the schedule to the configured peak rates; rates in a loaded checkpoint are ignored."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Store the peaks; call it before a checkpoint is loaded."""
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._main: float = optimizer.defaults["lr"]

    def apply(self, factor: float) -> dict[str, float]:
        """Set the rates to `factor` times the peaks; return `lr`, and `lr/<role>` of groups with another peak."""
        rates = {"lr": self._main * factor}
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
            if peak != self._main:
                rates[f"lr/{group['role']}"] = group["lr"]
        return rates
