"""Messages between the HTTP server and the trainer's ranks: operations on models, and their answers.

Arrays are bytes in the machine's order, because both sides run on the same machine.
"""

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 2**31
"""Limit of a message."""


class Sample(msgspec.Struct, array_like=True):
    """One datum: tokens, and the (position, target) pairs to score, flattened from [N] or [N, K]."""

    tokens: bytes  # int64 [N]
    positions: bytes  # int64 [M], ascending
    targets: bytes  # int64 [M]
    arrays: dict[str, bytes]  # inputs of the loss, float32 [M]


class ForwardBackward(msgspec.Struct, tag=True):
    """Score samples, and add the gradient of their loss; answers with the log-probabilities."""

    model_id: str
    samples: list[Sample]
    loss_fn: str
    options: dict[str, float]
    forward_only: bool


class OptimStep(msgspec.Struct, tag=True):
    """Apply the accumulated gradients by Adam with decoupled weight decay, and discard them."""

    model_id: str
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class SaveWeights(msgspec.Struct, tag=True):
    """Write the adapter as a published version, with the state of its optimizer for `with_optimizer`."""

    model_id: str
    directory: str
    with_optimizer: bool
    fields: dict[str, Any] = {}  # further fields of the manifest
    overwrite: bool = False  # replace an earlier one


class LoadWeights(msgspec.Struct, tag=True):
    """Read what `SaveWeights` wrote into a model of the same kind; without `with_optimizer` its state is empty."""

    model_id: str
    directory: str
    with_optimizer: bool


class CreateModel(msgspec.Struct, tag=True):
    """Add a model with a new adapter: rank, seed, and which layers it has; `load` continues a checkpoint."""

    model_id: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    load: LoadWeights | None = None


class RemoveModel(msgspec.Struct, tag=True):
    """Free the memory of a model."""

    model_id: str


Operation = CreateModel | ForwardBackward | OptimStep | SaveWeights | LoadWeights | RemoveModel


class Answer(msgspec.Struct):
    """Result of an operation; `error` is None if it succeeded."""

    error: str | None = None
    is_user_error: bool = False
    logprobs: list[bytes] = []  # float32 [M] of each sample
    metrics: dict[str, float] = {}
