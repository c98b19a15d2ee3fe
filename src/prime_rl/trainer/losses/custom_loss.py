"""User-defined losses, loaded by import path. Each of their failures becomes a one-line error."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.import_utils import load_function
from prime_rl.trainer.losses.loss_inputs import Loss, LossInputs, LossOutput

_KEY = "loss.import_path"


def custom(import_path: str, kwargs: dict[str, Any], proximal: bool = False) -> Loss:
    """Load `function(inputs: LossInputs, **kwargs)`, which returns a `LossOutput` or the losses [T] alone.

    With `proximal`, `inputs.proximal_logprobs` is also set before the first update: the trainer's own logprobs.

    Raises:
        ConfigError: the function cannot be loaded. The returned loss raises it if the function raises or does not
            return a loss.
    """
    return partial(_call, load_function(import_path, _KEY), import_path, kwargs, proximal)


def _call(
    function: Callable[..., Any], name: str, kwargs: dict[str, Any], proximal: bool, inputs: LossInputs
) -> LossOutput:
    if proximal and inputs.proximal_logprobs is None:
        inputs = replace(inputs, proximal_logprobs=inputs.logprobs.detach())
    try:
        answer = function(inputs, **kwargs)
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"{_KEY} = {name!r} failed: {summarize_exception(error, location=True)}") from error
    output = LossOutput.unmasked(answer) if isinstance(answer, Tensor) else answer
    is_loss = isinstance(output, LossOutput)
    for part in [getattr(output, field.name) for field in fields(LossOutput)] if is_loss else [answer]:
        if not isinstance(part, Tensor) or part.shape != inputs.logprobs.shape:
            found = f"a tensor of shape {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ConfigError(
                f"{_KEY} = {name!r} returned {found}; return one loss per token, shape [{len(inputs.logprobs)}]"
            )
    if output.loss.requires_grad:
        return output
    if inputs.mask.any():
        raise ConfigError(f"{_KEY} = {name!r} returned losses without a gradient; compute them from inputs.logprobs")
    # Connect a row without trained tokens to the graph: all ranks gather weights in the backward pass.
    return replace(output, loss=output.loss + inputs.logprobs.masked_fill(~inputs.mask, 0.0))
