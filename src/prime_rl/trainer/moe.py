"""How evenly a mixture of experts uses its experts, watched from outside and without waiting for the device.

I9 world size is invisible: counts are summed over all rows and ranks of a step before anything is divided. Rows that
train on nothing, which only even out the ranks, are not counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("moe/max_violation", "moe/idle_experts", "moe/routing_confidence")


class Routing:
    """Counts which experts the routers choose, layer by layer.

    Every mixture of transformers calls its experts with the states, the experts chosen for each token and their
    weights; these calls are watched. Recomputation in the backward pass counts a layer twice, which changes no
    quotient.

    Attributes:
        counted: how many tokens of the calls to come are counted; what follows them fills up a row.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch the experts of `model`, none in a dense one; to be made before ranks share the experts."""
        self.counted = 0
        self._experts: list[int] = []
        # Per layer: tokens of each expert; sum over tokens of the share of the first expert; tokens.
        self._counts: Tensor | None = None
        for module in model.modules():
            stacked = module._parameters.get("down_proj")
            if stacked is not None and stacked.ndim == 3:
                module.register_forward_pre_hook(self._watch(len(self._experts)))
                self._experts.append(stacked.shape[0])

    def reduce(self, sum_ranks: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float | None]:
        """Say how balanced the routing was since the last call, and forget it. All ranks call it together.

        Args:
            sum_ranks: sums a tensor over the ranks, in place.
            device: where forward ran.

        Returns:
            Nothing for a dense model. For a mixture, means over the layers, None if nothing was counted:
            `moe/max_violation`, largest load of an expert over the mean load, less 1; 0 is perfect balance (Wang et al.
            2024, arXiv:2408.15664, section 4.1). `moe/idle_experts`, share of the experts that no token went to.
            `moe/routing_confidence`, share that the heaviest of the chosen experts has in their weight.
        """
        if not self._experts:
            return {}
        counts = self._zeros(device) if self._counts is None else self._counts
        self._counts = None
        layers = [(row[:n], row[-2] / row[-1]) for n, row in zip(self._experts, sum_ranks(counts), strict=True)]
        violation = torch.stack([load.max() / load.mean() - 1 for load, _ in layers])
        idle = torch.stack([(load == 0).double().mean() for load, _ in layers])
        confidence = torch.stack([share for _, share in layers])
        counted = bool(counts[0].any())
        means = torch.stack([violation, idle, confidence]).mean(1).tolist()
        return {name: mean if counted else None for name, mean in zip(_NAMES, means, strict=True)}

    def _watch(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self.counted and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                chosen, weights = (x[: self.counted].detach() for x in arguments[1:3])
                self._count(layer, chosen, weights.double())

        return before

    def _count(self, layer: int, chosen: Tensor, weights: Tensor) -> None:
        """Args: chosen and weights, the experts of each token and what they weigh, [tokens, chosen]."""
        if self._counts is None:
            self._counts = self._zeros(chosen.device)
        row = self._counts[layer]
        row.scatter_add_(0, chosen.flatten(), torch.ones_like(weights).flatten())
        row[-2] += (weights.amax(1) / weights.sum(1)).sum()
        row[-1] += len(weights)

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(len(self._experts), max(self._experts) + 2, dtype=torch.float64, device=device)
