"""The experts that routers choose: their load, and replay of the sampler's choices.

Router replay (R3, "Stabilizing MoE reinforcement learning by aligning training and inference routers", 2025,
arXiv:2510.11370) trains each token with the experts that sampled it. Their weights are those of the trained router, so
its scores of these experts get gradients.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from prime_rl.core.errors import ConfigError

_ROUTING_METRICS = ("moe/max_violation", "moe/idle_experts", "moe/routing_confidence")


class RouterLoadBalance:
    """Counts the experts that the routers of a mixture choose in every layer, without reads from the device.

    Counts are summed over all rows and ranks of a step before any division, so they do not depend on the world size
    (I9). Rows without trained tokens, which only pad the ranks, are not counted.

    Hooks observe the calls of the experts, whose arguments are the states, the chosen experts and their weights.
    Recomputation in the backward pass counts a layer twice, which changes no quotient.
    """

    def __init__(self, model: nn.Module) -> None:
        """Observe the experts of `model`; call it before expert parallelism divides them."""
        self.counted = 0  # tokens to count in the next calls; the remaining tokens are padding
        self._experts: list[int] = []
        # Per layer: tokens of each expert; sum over tokens of the heaviest expert's fraction of the weight; tokens.
        self._counts: dict[int, Tensor] = {}
        self.run = 0  # whose rows are processed, if several runs share the model
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
        counts = self._counts.pop(self.run, self._zeros(device))
        layers = [(row[:n], row[-2] / row[-1]) for n, row in zip(self._experts, sum_ranks(counts), strict=True)]
        violation = torch.stack([load.max() / load.mean() - 1 for load, _ in layers])
        idle = torch.stack([(load == 0).double().mean() for load, _ in layers])
        confidence = torch.stack([fraction for _, fraction in layers])
        counted = bool(counts[0].any())
        means = torch.stack([violation, idle, confidence]).mean(1).tolist()
        return {name: mean if counted else None for name, mean in zip(_ROUTING_METRICS, means, strict=True)}

    def _make_hook(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self.counted and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                chosen, weights = (x[: self.counted].detach() for x in arguments[1:3])  # [tokens, chosen]
                weights = weights.double()
                if self.run not in self._counts:
                    self._counts[self.run] = self._zeros(chosen.device)
                row = self._counts[self.run][layer]
                last = self._experts[layer] - 1
                # Higher ids are LongCat's experts that compute nothing; they are not counted.
                row.scatter_add_(0, chosen.clamp(max=last).flatten(), (chosen <= last).to(weights).flatten())
                row[-2] += (weights.amax(1) / weights.sum(1)).sum()
                row[-1] += len(weights)

        return before

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(len(self._experts), max(self._experts) + 2, dtype=torch.float64, device=device)


def num_experts(block: nn.Module) -> int:
    """Return the number of experts of a mixture, a module that owns them and calls a router; 0 of other modules."""
    experts = block._modules.get("experts")
    stacks = [p for p in experts.parameters(recurse=False) if p.ndim == 3] if experts is not None else []
    return len(stacks[0]) if stacks else 0


class RouterReplay:
    """Replaces the experts that routers choose by recorded ones, without reads from the device.

    During the forward pass of each mixture, and again when it is recomputed in the backward pass, the one `topk` over
    the scores of all experts returns the recorded experts and their scores. Tokens without a record in a layer, whose
    ids are all equal, keep the router's own choice.

    Attributes:
        num_layers: layers of a record, with and without experts.
        top_k: experts of each token.
        num_experts: by index of the layer, for those with experts.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """Wrap the mixtures of `causal_lm`; call it before expert parallelism divides the experts.

        Raises ConfigError if there are none, or they do not choose one fixed number of experts, at least 2.
        """
        text, self._name = causal_lm.config.get_text_config(), causal_lm.config.name_or_path
        self.num_layers = int(text.num_hidden_layers)
        self.num_experts: dict[int, int] = {}
        chosen = set[int]()
        for name, block in causal_lm.named_modules():
            number = re.search(r"\.(\d+)(\.|$)", name)
            if number and (count := num_experts(block)):
                layer = int(number[1])
                self.num_experts[layer] = count
                chosen.add(_experts_per_token(block, text))
                self._wrap(block, layer)
        if not self.num_experts:
            raise ConfigError(f"model.router_replay: {self._name} has no mixtures of experts; set it to false")
        self.top_k = max(chosen)
        if len(chosen) > 1 or self.top_k < 2:
            raise ConfigError(
                f"model.router_replay: {self._name} chooses {' or '.join(map(str, sorted(chosen)))} experts per token; "
                "it needs the same number in all layers, at least 2; set it to false"
            )
        self._routes: Tensor | None = None  # [t, L, k] of the row that is processed
        self._has_record: Tensor | None = None  # bool [t, L]
        self._uncounted = set[int]()  # layers that are not counted yet in this row
        self._totals: Tensor | None = None  # choices (tokens times layers), those replayed, and differing experts

    def check(self, routes: Tensor | None) -> None:
        """Check the records [T, L, k] of a row on the host. Raises ConfigError if they do not fit the model."""
        wanted, off = (self.num_layers, self.top_k), "or set model.router_replay = false"
        if routes is None:
            raise ConfigError(
                "the batch has no routed_experts, which model.router_replay needs; set enable_return_routed_experts of "
                f"the inference server, {off}, until groups of a run that began without it are trained"
            )
        if tuple(routes.shape[1:]) != wanted:
            found = " layers and ".join(map(str, routes.shape[1:]))
            raise ConfigError(
                f"the routed_experts of the batch have {found} experts per token, but {self._name} has {wanted[0]} and "
                f"{wanted[1]}; let the server and the trainer use the same model, {off}"
            )
        largest = (routes if routes.dtype == torch.uint8 else routes.int() & 0xFFFF).amax((0, 2)).tolist()
        for layer, count in self.num_experts.items():
            if largest[layer] >= count:
                raise ConfigError(
                    f"the routed_experts of the batch contain expert {largest[layer]} in layer {layer}, but "
                    f"{self._name} has {count} experts; let the server and the trainer use the same model, {off}"
                )

    def begin_row(self, routes: Tensor | None, has_successor: Tensor | None = None) -> None:
        """Replay `routes` [t, L, k] in the passes of the next row; None replays nothing.

        If these compute gradients, they add to the metrics; `has_successor`, bool, is set for the tokens that have a
        next one in their segment, trained or not.
        """
        self._routes, self._uncounted = routes, set()
        if routes is not None:
            self._has_record = (routes != routes[..., :1]).any(2)
            if has_successor is not None and torch.is_grad_enabled():
                self._uncounted = set(self.num_experts)
                self._add(0, has_successor.sum() * len(self.num_experts))

    def reduce(self, sum_ranks: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float | None]:
        """Return the metrics since the last call and reset the counts; a collective call.

        `routing/replayed`, fraction of the choices for tokens with a successor that were replayed.
        `routing/disagreement`, fraction of the recorded experts of these that the trainer's own top-k would not have
        chosen. None without such choices.
        """
        totals = torch.zeros(3, dtype=torch.float64, device=device) if self._totals is None else self._totals
        self._totals = None
        choices, replayed, differing = sum_ranks(totals).tolist()
        return {
            "routing/replayed": replayed / choices if choices else None,
            "routing/disagreement": differing / (replayed * self.top_k) if replayed else None,
        }

    def _wrap(self, block: nn.Module, layer: int) -> None:
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Choices(self, layer) as choices:
                result = inner(*args, **kwargs)
            if choices.count != 1:
                raise ConfigError(
                    f"model.router_replay: the routers of {self._name} are not supported: a {type(block).__name__} "
                    f"chooses {self.top_k} of {self.num_experts[layer]} experts {choices.count} times by topk, not "
                    "once; set it to false"
                )
            return result

        block.forward = forward

    def _choose(self, layer: int, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and ids [t, k] of the experts that are used instead of the router's `own` [t, k]."""
        ids = own
        if self._routes is not None and self._has_record is not None:
            recorded, has_record = self._routes[:, layer].long(), self._has_record[:, layer, None]
            ids = torch.where(has_record, recorded, own)
            if layer in self._uncounted:
                self._uncounted.remove(layer)
                self._add(1, has_record.sum())
                self._add(2, ((recorded[:, :, None] != own[:, None, :]).all(2) & has_record).sum())
        return scores.gather(1, ids), ids

    def _add(self, index: int, count: Tensor) -> None:
        if self._totals is None:
            self._totals = torch.zeros(3, dtype=torch.float64, device=count.device)
        self._totals[index] += count


class _Choices(TorchFunctionMode):
    """Passes the choice of experts in a layer to `RouterReplay`, and counts such choices."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer, self.count = replay, layer, 0
        self._masked: tuple[Tensor, Tensor] | None = None  # the last masked scores, and the same before the mask

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name == "masked_fill":
            # Weights of recorded experts are those before a mask that limits the groups of experts (DeepSeek-V2).
            self._masked = (result, args[0])
        elif name == "topk" and self._is_choice(*args, **(kwargs or {})):
            self.count += 1
            scores = args[0] if args else (kwargs or {})["input"]
            if self._masked is not None and self._masked[0] is scores:
                scores = self._masked[1]
            return torch.return_types.topk(self._replay._choose(self._layer, scores, result.indices))
        return result

    def _is_choice(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> bool:
        """Return whether a `topk` chooses experts; limits of groups have three dimensions or fewer columns."""
        routes, count = self._replay._routes, self._replay.num_experts[self._layer]
        rows = len(input) if routes is None else len(routes)
        return k == self._replay.top_k and dim in (-1, 1) and input.shape == (rows, count)


def _experts_per_token(block: nn.Module, text: Any) -> int:
    """Return the number of experts that a mixture chooses; `text` is the model's configuration."""
    known = [count for module in block.modules() if type(count := getattr(module, "top_k", None)) is int]
    configured = (getattr(text, key, None) for key in ("num_experts_per_tok", "top_k_experts"))  # Gemma 4: the latter
    return known[0] if known else next((int(count) for count in configured if count), 0)
