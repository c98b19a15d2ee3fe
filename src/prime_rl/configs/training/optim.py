"""`optim` and `scheduler`: optimizers and learning rate schedules."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig, common


class OptimizerConfig(BaseConfig):
    """Keys of every optimizer."""

    type: str
    """Optimizer."""

    lr: float = Field(1e-6, ge=0, json_schema_extra=common("Training"))
    """Peak learning rate."""

    embedding_lr: float | None = Field(None, ge=0)
    """Peak learning rate of the input embedding, and of an output head that is tied to it; None uses lr."""

    unembedding_lr: float | None = Field(None, ge=0)
    """Peak learning rate of an untied output head; None uses lr."""

    matrix_lr: float | None = Field(None, ge=0)
    """Peak learning rate of all other matrices, with adapters and experts; None uses lr. Norms and biases use lr."""

    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of the matrices; embedding, output head, norms and biases have none."""

    max_norm: float | None = Field(1.0, gt=0)
    """Gradient norm clipping; None does not clip."""


class _Adam(OptimizerConfig):
    deprecated: ClassVar[dict[str, str]] = {"betas1": "beta1", "betas2": "beta2"}

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's running mean of the gradient."""

    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's running mean of the squared gradient."""

    eps: float = Field(1e-8, gt=0)
    """Term in the denominator of AdamW's update."""


class AdamWConfig(_Adam):
    """AdamW."""

    type: Literal["adamw"] = "adamw"


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent; weight decay is added to the gradient."""

    type: Literal["sgd"] = "sgd"

    momentum: float = Field(0.9, ge=0, lt=1)
    """Decay of the running sum of gradients."""

    nesterov: bool = True
    """Use Nesterov momentum."""


class MuonConfig(_Adam):
    """Muon for matrices; AdamW for embedding, output head, norms and biases."""

    deprecated: ClassVar[dict[str, str]] = {"mu": "momentum"}

    type: Literal["muon"] = "muon"

    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of the gradient, for matrices."""

    nesterov: bool = True
    """Use Nesterov momentum for matrices."""

    ns_steps: int = Field(5, ge=1, le=99)
    """Newton-Schulz iterations that orthogonalise an update."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the learning rate of a matrix [m, n]: 0.2 sqrt(max(m, n)), which fits learning rates tuned for AdamW,
    or sqrt(max(1, m / n))."""

    beta2: float = Field(0.95, ge=0, lt=1)


OptimConfig = Annotated[AdamWConfig | SGDConfig | MuonConfig, Field(discriminator="type")]


class _Scheduler(BaseConfig):
    type: str
    """Learning rate schedule."""

    warmup_steps: int = Field(0, ge=0, json_schema_extra=common("Training"))
    """Steps of the linear warm-up to the peak learning rate."""

    factor: float = Field(1.0, gt=0)
    """Factor on all learning rates, such as 0.05 for rates that were tuned for pretraining."""


class ConstantSchedulerConfig(_Scheduler):
    """Constant learning rate after an optional warm-up."""

    type: Literal["constant"] = "constant"


class _Decay(_Scheduler):
    decay_steps: int | None = Field(None, ge=1)
    """Steps of the decay at the end of the run; None decays from the end of the warm-up."""

    min_lr: float = Field(0.0, ge=0)
    """Final learning rate, at most scheduler.factor * optim.lr; other learning rates decay by the same share."""


class LinearSchedulerConfig(_Decay):
    """Linear decay."""

    type: Literal["linear"] = "linear"


class CosineSchedulerConfig(_Decay):
    """Cosine decay."""

    type: Literal["cosine"] = "cosine"


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]
