"""Optimizers and schedules, for reinforcement learning and supervised fine-tuning alike."""

from typing import Annotated, Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig


class OptimizerConfig(BaseConfig):
    """What every optimizer has."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""

    embedding_lr: float | None = Field(None, ge=0)
    """Peak for the input embedding, and for the output head where the two are tied; None takes lr."""

    unembedding_lr: float | None = Field(None, ge=0)
    """Peak for an output head that is not tied to the embedding; None takes lr."""

    matrix_lr: float | None = Field(None, ge=0)
    """Peak for all other matrices, adapters and experts included; None takes lr. Norms and biases always have lr."""

    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of the matrices; embedding, output head, norms and biases have none."""

    max_norm: float | None = Field(1.0, gt=0)
    """Gradient norm is clipped to this; None does not clip."""


class AdamWConfig(OptimizerConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """Kind of optimizer."""

    betas1: float = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""

    betas2: float = Field(0.999, ge=0, lt=1)
    """Decay of the running mean of the squared gradient."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent; weight decay is added to the gradient."""

    type: Literal["sgd"] = "sgd"
    """Kind of optimizer."""

    momentum: float = Field(0.9, ge=0, lt=1)
    """Decay of the running sum of gradients."""

    nesterov: bool = True
    """Nesterov momentum."""


class MuonConfig(OptimizerConfig):
    """Muon for the matrices, AdamW for embedding, output head, norms and biases."""

    type: Literal["muon"] = "muon"
    """Kind of optimizer."""

    mu: float = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of the gradient, for matrices."""

    nesterov: bool = True
    """Nesterov momentum, for matrices."""

    ns_steps: int = Field(5, ge=1, le=99)
    """Newton-Schulz iterations that orthogonalise an update."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the rate of a matrix [m, n]: 0.2 sqrt(max(m, n)), with which rates tuned for AdamW fit, or
    sqrt(max(1, m / n))."""

    betas1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the running mean of the gradient."""

    betas2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the running mean of the squared gradient."""


OptimConfig = Annotated[AdamWConfig | SGDConfig | MuonConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """Constant learning rate after an optional warm-up."""

    type: Literal["constant"] = "constant"
    """Kind of schedule."""

    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly to its peak."""


class LinearSchedulerConfig(ConstantSchedulerConfig):
    """Linear decay."""

    type: Literal["linear"] = "linear"  # type: ignore[assignment]
    """Kind of schedule."""

    decay_steps: int | None = Field(None, ge=1)
    """Steps over which the rate falls, at the end of the run; None means all after the warm-up."""

    min_lr: float = Field(0.0, ge=0)
    """Rate at the end, at most optim.lr; rates of other groups end at the same share of their own peak."""


class CosineSchedulerConfig(LinearSchedulerConfig):
    """Cosine decay."""

    type: Literal["cosine"] = "cosine"  # type: ignore[assignment]
    """Kind of schedule."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


def check_schedule(scheduler: SchedulerConfig, optim: OptimConfig) -> None:
    """Refuse a schedule that would end above its peak.

    Raises:
        ValueError: `min_lr` is above `optim.lr`.
    """
    if isinstance(scheduler, LinearSchedulerConfig) and scheduler.min_lr > optim.lr:
        raise ValueError(f"scheduler.min_lr = {scheduler.min_lr} is above optim.lr = {optim.lr}, which it decays from")
