"""The loss of one batch over a plane through the versions of a run.

The plane contains the last version and the first two principal directions of the differences to it. The loss is the
surrogate of one kept batch, without a KL penalty: a true landscape of the reward would need rollouts for each point.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.loss import LossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.batch import ROWS_FILE, Batch, read_batch
from prime_rl.storage.checkpoint_artifacts import TRAINER, find_checkpoints
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.trainer.checkpoints.trainer_state import load_model_and_optimizer
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import World, join_world
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.train_step import ScoredRow
from prime_rl.trainer.weights.policy_loading import load_policy
from prime_rl_page.loss_surface import LossSurface

GRID_SIZE = 11
MAX_VERSIONS = 8
"""Versions that are held in memory, at equal distances."""
_MARGIN = 0.2
"""Part of the extent of the versions by which the grid exceeds them on each side."""
_NEGLIGIBLE = 1e-10


class WeightPlane:
    """The plane through the last of at least three versions.

    Attributes:
        coordinates: float64 [versions, 2].

    Raises:
        ConfigError: the versions lie on a line.
    """

    def __init__(self, versions: Sequence[Mapping[str, Tensor]]) -> None:
        self._center = versions[-1]
        size = len(versions)
        gram = torch.zeros(size, size, dtype=torch.float64)
        for name, center in self._center.items():
            differences = torch.stack([version[name] - center for version in versions]).flatten(1).double()
            gram += differences @ differences.T
        values, vectors = torch.linalg.eigh(gram)
        values, vectors = values[-2:].flip(0), vectors[:, -2:].flip(1)
        if values[1] <= _NEGLIGIBLE * values[0]:
            raise ConfigError("the versions do not span a plane; the loss surface needs three different versions")
        self.coordinates: NDArray[np.float64] = (vectors * values.sqrt()).numpy()
        weights = (vectors / values.sqrt()).float()
        self._directions = {
            name: torch.einsum("vd,v...->d...", weights, torch.stack([version[name] - center for version in versions]))
            for name, center in self._center.items()
        }

    @torch.no_grad()
    def apply(self, policy: PolicyModel, x: float, y: float) -> None:
        """Set the weights of `policy` to those at a point of the plane."""
        for name, parameter in policy.named_parameters():
            first, second = self._directions[name]
            parameter.copy_(self._center[name] + x * first + y * second)


def measure_loss_surface(paths: RunPaths, step: int | None = None) -> LossSurface:
    """Measure the surface for the versions in weights/ and checkpoints of a run, in one process on the CPU.

    Args:
        step: the batch; None uses the newest one whose rows are kept (`keep_batches`).

    Raises:
        ConfigError: the run has no trainer configuration, batch, or three versions, or publishes adapters.
    """
    file = paths.config("trainer")
    if not file.exists():
        raise ConfigError(f"{file} does not exist; the loss surface needs the directory of a run started by `rl`")
    config = TrainerConfig.load(["@", str(file)])
    if config.model.lora is not None and config.model.lora.publish == "adapter":
        raise ConfigError("the run publishes adapters; the loss surface needs whole versions")
    batch, number = _read_kept_batch(paths, step)
    found = _find_versions(config, paths)
    steps = sorted(found)
    chosen = sorted({steps[i * (len(steps) - 1) // (MAX_VERSIONS - 1)] for i in range(MAX_VERSIONS)} if steps else ())
    if len(chosen) < 3:
        raise ConfigError(
            f"{paths.root} holds {len(chosen)} versions in weights/ and checkpoints; the loss surface needs at least "
            "three (--ckpt --ckpt.interval N keeps checkpoints)"
        )
    with join_world("cpu", 600) as world:
        policy = _load(config.model, paths.weights(steps_in(paths.weights_dir)[-1]), config.seed)
        versions = {}
        for version in chosen:
            if found[version].parent == paths.weights_dir:
                policy = _load(config.model, found[version], config.seed)
            else:
                load_model_and_optimizer(found[version] / TRAINER, policy, None)
            versions[version] = {name: p.detach().float().clone() for name, p in policy.named_parameters()}
        return surface(policy, versions, batch_loss(config.loss, config.model.seq_len, batch, number, world))


def _find_versions(config: TrainerConfig, paths: RunPaths) -> dict[int, Path]:
    """Return weights and checkpoints by step. A run deletes old weights; checkpoints of adapters are no whole model."""
    if not (published := steps_in(paths.weights_dir)):
        return {}
    directory = paths.checkpoints_dir if config.ckpt is None else paths.root / config.ckpt.path
    saved = find_checkpoints(directory).steps if config.model.lora is None else []
    return {step: directory / f"step_{step}" for step in saved} | {step: paths.weights(step) for step in published}


def surface(
    policy: PolicyModel, versions: Mapping[int, Mapping[str, Tensor]], loss: Callable[[PolicyModel], float]
) -> LossSurface:
    """Measure `loss` on a grid around the versions (step -> parameters); the weights of `policy` are changed."""
    plane = WeightPlane(list(versions.values()))
    low, high = plane.coordinates.min(axis=0), plane.coordinates.max(axis=0)
    margin = _MARGIN * (high - low)
    x, y = (np.linspace(low[i] - margin[i], high[i] + margin[i], GRID_SIZE).tolist() for i in range(2))
    losses: list[list[float]] = []
    for row, second in enumerate(y):
        losses.append([])
        for first in x:
            plane.apply(policy, first, second)
            losses[-1].append(loss(policy))
        logger.info("loss surface: row {} of {}", row + 1, GRID_SIZE)
    path = [(step, float(a), float(b)) for step, (a, b) in zip(versions, plane.coordinates, strict=True)]
    return LossSurface(x, y, losses, path)


def batch_loss(
    config: LossConfig, seq_len: int, batch: Batch, step: int, world: World
) -> Callable[[PolicyModel], float]:
    """Return a function that computes the loss of a policy on the whole batch, without a KL penalty."""
    objective = build_objective(config.model_copy(update={"kl": None}), seq_len)
    (minibatch,) = split_batch(batch, step, 1, world, max_tokens=seq_len)

    @torch.no_grad()
    def loss(policy: PolicyModel) -> float:
        total = 0.0
        for row in minibatch.rows:
            logprobs, entropy, *outside = policy(row)
            scored = ScoredRow(row, logprobs, entropy, True, minibatch.counts, *outside)
            total += objective(scored).loss.item()
        return total

    return loss


_NOT_OF_A_VERSION = {
    *("name", "debug", "lora", "impl", "attn", "compile", "ac", "ac_offloading", "fsdp_cpu_offload"),
    *("optim_cpu_offload", "reshard_ranks", "dp_replicate", "tp", "ep", "cp"),
}
"""Keys of the run's model that do not apply to a published version in one process on a CPU."""


def _load(model: TrainerModelConfig, directory: Path, seed: int) -> PolicyModel:
    """Load a published version with the settings of the run's model, without those of training and of several ranks."""
    keys = model.model_dump(exclude=_NOT_OF_A_VERSION)
    return load_policy(TrainerModelConfig.model_validate({**keys, "name": str(directory)}), seed)


def _read_kept_batch(paths: RunPaths, step: int | None) -> tuple[Batch, int]:
    kept = [known for known in steps_in(paths.rollouts_dir) if (paths.rollouts(known) / ROWS_FILE).exists()]
    if not kept or (step is not None and step not in kept):
        known = ", ".join(map(str, kept)) or "none"
        raise ConfigError(
            f"{paths.rollouts_dir} has no rows of {'a batch' if step is None else f'batch {step}'}; kept are: {known} "
            "(--trainer.keep-batches keeps all)"
        )
    number = kept[-1] if step is None else step
    with translate_error(ArtifactError, lambda error: ConfigError(f"batch {number}: {error}")):
        return read_batch(paths.rollouts(number), number)[0], number
