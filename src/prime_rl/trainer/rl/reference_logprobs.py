"""Log-probabilities of a reference model and of the policy before the first update of a step, without gradient.

The KL penalty and distillation use the former, decoupled PPO the latter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.loss import CustomLossConfig, DecoupledPPOLossConfig
from prime_rl.configs.training.model import DebugModelConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model.lora import adapted_layers
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.train_step import Minibatch
from prime_rl.trainer.weights.policy_loading import make_policy


class References:
    """Adds `ref_logprobs` and `proximal_logprobs` to rows, if the configured loss needs them."""

    def __init__(self, config: TrainerConfig, policy: PolicyModel, world: World) -> None:
        """Load the reference model, if one is needed. All ranks call it together.

        If the policy trains adapters on the reference model, the policy without adapters is used; nothing is loaded.
        Raises ConfigError if the reference model is missing or not supported.
        """
        self._policy, self._world = policy, world
        self._needs_proximal = isinstance(config.loss, DecoupledPPOLossConfig) or (
            isinstance(config.loss, CustomLossConfig) and config.loss.proximal
        )
        self._model: PolicyModel | None = None
        self._without_adapters = False
        if config.reference_name is not None:
            self._without_adapters = config.model.lora is not None and config.reference_name == config.model.name
            self._model = policy if self._without_adapters else _load_reference(config, config.reference_name, world)

    def score(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with the log-probabilities in their rows. All ranks call it together.

        `ref_logprobs` that the batch contains stay. `proximal_logprobs` of the first minibatch stay None: they
        are those of its forward pass. Raises ConfigError if the batch has tokens or positions outside the
        reference model's range.
        """
        scored = list(minibatches)
        if self._model is not None and scored[0].rows[0].ref_logprobs is None:
            scored = [_add(part, "ref_logprobs", self._reference) for part in scored]
            reshard_policy(self._model)
        if self._needs_proximal:
            scored[1:] = [_add(part, "proximal_logprobs", self._proximal) for part in scored[1:]]
        return scored

    def _reference(self, row: MicroBatch) -> Tensor:
        assert self._model is not None
        with translate_error(ConfigError, lambda error: ConfigError(f"reference.name: {error}")):
            self._model.check_row(row)
        with _adapters_off(self._policy) if self._without_adapters else torch.no_grad():
            return _logprobs(self._model, row.to(self._world.device))

    def _proximal(self, row: MicroBatch) -> Tensor:
        return _logprobs(self._policy, row.to(self._world.device))


def _load_reference(config: TrainerConfig, name: str, world: World) -> PolicyModel:
    """Load a frozen model, sharded like the policy, in the precision of the forward pass."""
    changed: dict[str, Any] = {"name": name, "lora": None, "ac": None, "ac_offloading": None}
    if name != config.model.name:
        changed["debug"] = DebugModelConfig()  # a teacher is complete even if the policy is shrunk or random
    with translate_error(ConfigError, lambda error: ConfigError(f"reference.name = {name!r}: {error}")):
        return make_policy(config.model.model_copy(update=changed), config.seed, world, frozen=True)


def _add(minibatch: Minibatch, field: str, score: Callable[[MicroBatch], Tensor]) -> Minibatch:
    return replace(minibatch, rows=[replace(row, **{field: score(row)}) for row in minibatch.rows])


@torch.no_grad()
def _logprobs(model: PolicyModel, row: MicroBatch) -> Tensor:
    return model(row)[0]


@contextmanager
def _adapters_off(policy: PolicyModel) -> Iterator[None]:
    """Scale the adapters by 0, which gives the base model with the same collectives on all ranks."""
    layers = list(adapted_layers(policy).values())
    configs = [layer.config for layer in layers]
    for layer in layers:
        layer.config = layer.config.model_copy(update={"alpha": 0.0})
    try:
        yield
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.config = config
