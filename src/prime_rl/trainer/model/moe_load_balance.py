"""Load balance of the experts of a mixture, without reads from the device.

Counts are summed over all rows and ranks of a step before any division, so they do not depend on the world size (I9).
Rows without trained tokens, which only pad the ranks, are not counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("moe/max_violation", "moe/idle_experts", "moe/routing_confidence")


class RouterLoadBalance:
    """Counts the experts that the routers choose in every layer.

    Hooks observe the calls of the experts, whose arguments are the states, the chosen experts and their weights.
    Recomputation in the backward pass counts a layer twice, which changes no quotient.
    """

    def __init__(self, model: nn.Module) -> None:
        """Observe the experts of `model`; call it before expert parallelism divides them."""
        self.counted = 0  # tokens to count in the next calls; the remaining tokens are padding
        self._experts: list[int] = []
        # Per layer: tokens of each expert; sum over tokens of the heaviest expert's fraction of the weight; tokens.
        self._counts: Tensor | None = None
        for module in model.modules():
            stacked = module._parameters.get("down_proj")
            if stacked is not None and stacked.ndim == 3:
                module.register_forward_pre_hook(self._make_hook(len(self._experts)))
                self._experts.append(stacked.shape[0])

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return bool(self._experts)

    def reduce(self, sum_ranks: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float | None]:
        """Return the metrics since the last call and reset the counts; a collective call.

        Empty for a dense model. For a mixture, means over the layers, or None without counted tokens:
        `moe/max_violation`, largest load of an expert over the mean load, minus 1; 0 is perfect balance (Wang et al.
        2024, arXiv:2408.15664, section 4.1). `moe/idle_experts`, fraction of experts without tokens.
        `moe/routing_confidence`, weight of the heaviest chosen expert over the weight of all chosen experts.
        """
        if not self._experts:
            return {}
        counts = self._zeros(device) if self._counts is None else self._counts
        self._counts = None
        layers = [(row[:n], row[-2] / row[-1]) for n, row in zip(self._experts, sum_ranks(counts), strict=True)]
        violation = torch.stack([load.max() / load.mean() - 1 for load, _ in layers])
        idle = torch.stack([(load == 0).double().mean() for load, _ in layers])
        confidence = torch.stack([fraction for _, fraction in layers])
        counted = bool(counts[0].any())
        means = torch.stack([violation, idle, confidence]).mean(1).tolist()
        return {name: mean if counted else None for name, mean in zip(_NAMES, means, strict=True)}

    def _make_hook(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self.counted and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                chosen, weights = (x[: self.counted].detach() for x in arguments[1:3])  # [tokens, chosen]
                weights = weights.double()
                if self._counts is None:
                    self._counts = self._zeros(chosen.device)
                row = self._counts[layer]
                row.scatter_add_(0, chosen.flatten(), torch.ones_like(weights).flatten())
                row[-2] += (weights.amax(1) / weights.sum(1)).sum()
                row[-1] += len(weights)

        return before

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(len(self._experts), max(self._experts) + 2, dtype=torch.float64, device=device)
