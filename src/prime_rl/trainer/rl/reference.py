"""Log-probabilities that a loss compares with, computed before the first update of a step, without gradient.

Those of a reference model (KL penalty, distillation) and those of the policy itself as the step begins (decoupled PPO).
Every rank calls the models equally often, padding rows included, as their weights are sharded over all (I7, I9).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from prime_rl.configs.loss import CustomLossConfig, DecoupledPPOLossConfig
from prime_rl.configs.trainer import DebugModelConfig, TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.engine import Minibatch
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.lora import adapted_layers
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.parallel import World


class References:
    """Adds `ref_logprobs` and `proximal_logprobs` to rows, where the configured loss asks for them."""

    def __init__(self, config: TrainerConfig, policy: PolicyModel, world: World) -> None:
        """Load the reference model, if one is needed. All ranks call it together.

        The base model of a policy that trains adapters is the policy without them: nothing is loaded.

        Raises:
            ConfigError: the reference model is missing or of a kind that cannot be scored.
        """
        self._policy, self._world = policy, world
        self._needs_proximal = isinstance(config.loss, DecoupledPPOLossConfig) or (
            isinstance(config.loss, CustomLossConfig) and config.loss.proximal
        )
        self._model: PolicyModel | None = None
        self._without_adapters = False
        if config.reference_name is not None:
            self._without_adapters = config.model.lora is not None and config.reference_name == config.model.name
            self._model = policy if self._without_adapters else _load(config, config.reference_name, world)

    def score(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with what is needed in their rows. All ranks call it together.

        A batch's own `ref_logprobs` stay. Of a lone minibatch, and of the first of several, the policy's
        log-probabilities as the step begins are those of its forward pass: `proximal_logprobs` stays None.

        Raises:
            ConfigError: the batch has tokens or positions that the reference model does not know.
        """
        scored = list(minibatches)
        if self._model is not None and scored[0].rows[0].ref_logprobs is None:
            scored = [_add(part, "ref_logprobs", self._reference) for part in scored]
            _release(self._model)
        if self._needs_proximal:
            scored[1:] = [_add(part, "proximal_logprobs", self._now) for part in scored[1:]]
        return scored

    def _reference(self, row: MicroBatch) -> Tensor:
        assert self._model is not None
        try:
            self._model.check_row(row)
        except ConfigError as error:
            raise ConfigError(f"reference.name: {error}") from None
        with _adapters_off(self._policy) if self._without_adapters else torch.no_grad():
            return _logprobs(self._model, row.to(self._world.device))

    def _now(self, row: MicroBatch) -> Tensor:
        return _logprobs(self._policy, row.to(self._world.device))


def _load(config: TrainerConfig, name: str, world: World) -> PolicyModel:
    """Load a frozen copy, laid out like the policy, in the precision of the forward pass."""
    changed: dict[str, Any] = {"name": name, "lora": None, "ac": None, "ac_offloading": None}
    if name != config.model.name:
        changed["debug"] = DebugModelConfig()  # a teacher is whole, also where the policy is shrunk or drawn at random
    try:
        return make_policy(config.model.model_copy(update=changed), config.seed, world, frozen=True)
    except ConfigError as error:
        raise ConfigError(f"reference.name = {name!r}: {error}") from error


def _add(minibatch: Minibatch, field: str, score: Callable[[MicroBatch], Tensor]) -> Minibatch:
    return replace(minibatch, rows=[replace(row, **{field: score(row)}) for row in minibatch.rows])


@torch.no_grad()
def _logprobs(model: PolicyModel, row: MicroBatch) -> Tensor:
    logprobs: Tensor = model(row)[0]
    return logprobs


def _release(model: PolicyModel) -> None:
    """Give gathered weights back: no backward pass follows that would."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _adapters_off(policy: PolicyModel) -> Iterator[None]:
    """Scale the adapters by 0: the base model, with the same calls on all ranks."""
    layers = list(adapted_layers(policy).values())
    configs = [layer.config for layer in layers]
    for layer in layers:
        layer.config = layer.config.model_copy(update={"alpha": 0.0})
    try:
        yield
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.config = config
