"""Check that the logits of a model are its output matrix times its last states, with a known factor and softcap.

`PolicyModel` computes log-probabilities from the states and the matrix, so it would silently lose other operations of
the model's forward (another scale, a projection). The check runs this forward with a backbone and an output layer that
return known values, before weights are read. It detects what no name in a configuration announces.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.core.errors import ConfigError, summarize_exception

_TOKENS = 2
_LARGEST = 100.0  # far above every softcap in use (30 or 50)
_TOLERANCE = 1e-3


class _Output:
    """Output of a backbone: the states, and None for every other field."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Backbone(nn.Module):
    """Returns states of ones, as do its submodules; other attributes are those of the original backbone."""

    def __init__(self, original: nn.Module, states: Tensor) -> None:
        super().__init__()
        self._states = states
        self.__dict__["_original"] = original  # set this way, it is not a submodule

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self._states)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_original"], name)
        return self if isinstance(value, nn.Module) else value  # OPT calls the decoder inside its backbone


class _Head(nn.Module):
    """Linear in its input, so that it detects a factor before the head as well."""

    def __init__(self, logits: Tensor, width: int) -> None:
        super().__init__()
        self.logits = logits
        self.weight = nn.Parameter(torch.zeros(1, width), requires_grad=False)
        self.bias = None

    def forward(self, states: Tensor) -> Tensor:
        return states[..., :1] * self.logits


@torch.no_grad()
def check_output_head(name: str, causal_lm: PreTrainedModel, divisor: float, softcap: float | None = None) -> None:
    """Raise ConfigError unless the logits are the output matrix times the backbone's states, divided by `divisor`.

    With `softcap`, that product x is replaced by softcap * tanh(x / softcap) before the division. The model may be on
    the meta device and does not change.
    """
    head, backbone = causal_lm.get_output_embeddings(), causal_lm.base_model
    if head is None or backbone is causal_lm or getattr(head, "weight", None) is None:
        raise ConfigError(f"model.name: {name} has no output head that is one matrix outside its backbone")
    vocabulary, width = head.weight.shape
    with torch.device("cpu"):
        known = torch.linspace(-_LARGEST, _LARGEST, vocabulary)
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
        replaced = {backbone: _Backbone(backbone, torch.ones(1, _TOKENS, width)), head: _Head(known, width)}
    places = {module: name for name, module in causal_lm.named_modules() if module in replaced}
    try:
        for original, module in replaced.items():
            causal_lm.set_submodule(places[original], module)
        got = causal_lm(input_ids=ids, use_cache=False).logits
    except Exception as error:  # the model's own code may raise anything
        raise ConfigError(f"model.name: {name}: cannot check its output head: {summarize_exception(error)}") from error
    finally:
        for original, place in places.items():
            causal_lm.set_submodule(place, original)
    capped = known if softcap is None else softcap * torch.tanh(known / softcap)
    wanted = (capped / divisor).expand(1, _TOKENS, -1)
    if got.shape != wanted.shape or not torch.allclose(got.float(), wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ConfigError(
            f"model.name: {name} computes its logits by more than one matrix, a constant factor and "
            "final_logit_softcapping; use a model that docs/training.md lists"
        )
