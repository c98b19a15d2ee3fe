"""A loss of the user's own, named by import path. Whatever it does wrong is one clear line."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from prime_rl.errors import ConfigError
from prime_rl.trainer.losses.base import Loss, LossInputs, LossOutput
from prime_rl.user_code import load_function, one_line

_KEY = "loss.import_path"


def custom(import_path: str, kwargs: dict[str, Any], proximal: bool = False) -> Loss:
    """Load `function(inputs: LossInputs, **kwargs)`, which answers with a `LossOutput` or the losses [T] alone.

    With `proximal` its `inputs.proximal_logprobs` are there also before the first update: the trainer's own.

    Raises:
        ConfigError: the function cannot be loaded; later, from the loss itself: it raised, or its answer is no loss.
    """
    return partial(_call, load_function(import_path, _KEY), import_path, kwargs, proximal)


def _call(
    function: Callable[..., Any], name: str, kwargs: dict[str, Any], proximal: bool, inputs: LossInputs
) -> LossOutput:
    if proximal and inputs.proximal_logprobs is None:
        inputs = replace(inputs, proximal_logprobs=inputs.logprobs.detach())
    try:
        answer = function(inputs, **kwargs)
    except Exception as error:  # foreign code: whatever it raises ends the run in one line
        raise ConfigError(f"{_KEY} = {name!r} failed: {one_line(error)}") from error
    output = LossOutput.plain(answer) if isinstance(answer, Tensor) else answer
    parts = (
        [getattr(output, field.name) for field in fields(LossOutput)] if isinstance(output, LossOutput) else [answer]
    )
    for part in parts:
        if not isinstance(part, Tensor) or part.shape != inputs.logprobs.shape:
            found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ConfigError(
                f"{_KEY} = {name!r} returned {found}; return one loss per token, [{len(inputs.logprobs)}]"
            )
    return output if output.loss.requires_grad else _connected(output, name, inputs)


def _connected(output: LossOutput, name: str, inputs: LossInputs) -> LossOutput:
    """Let a row without trained tokens take part in the backward pass, in which all ranks gather weights together."""
    if inputs.mask.any():
        raise ConfigError(f"{_KEY} = {name!r} returned losses without a gradient; compute them from inputs.logprobs")
    return replace(output, loss=output.loss + inputs.logprobs.masked_fill(~inputs.mask, 0.0))
