"""`trainer.loss` and `trainer.reference`: the loss, token weights, and a KL penalty (docs/algorithms.md)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig, ImportPath, common


class KLConfig(BaseConfig):
    """KL penalty towards a reference model, per token, added to the loss."""

    shorthand: ClassVar[str | None] = "coef"

    coef: float = Field(1e-3, ge=0)
    """Factor of the penalty."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator, with q = log(trainer / reference): k1 = q, k2 = q^2 / 2, k3 = exp(-q) - 1 + q."""

    straight_through: bool = False
    """Use the gradient of k2, which is unbiased on policy, with the value of `estimator`."""

    importance_weight: bool = False
    """Multiply by the importance ratio trainer / sampler, so that the estimate is unbiased off policy."""


Normalization = Literal["token", "sequence", "fixed"]


class _Loss(BaseConfig):
    type: str
    """Loss."""

    normalization: Normalization = "token"
    """Weight of a token: 1 / trained tokens, 1 / (sequences * trained tokens of its sequence), or 1 / (sequences *
    fixed_length), counted over the minibatch on all ranks."""

    fixed_length: int | None = Field(None, ge=1)
    """Divisor of each sequence with normalization fixed; None is model.seq_len, under `rl` the orchestrator's
    seq_len."""

    entropy_coef: float = Field(0.0, ge=0)
    """Factor of the entropy of each token, which is subtracted from the loss (an entropy bonus)."""

    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of the tokens with a policy gradient, those of the highest entropy (arXiv 2506.01939). The threshold is a
    quantile over the minibatch on all ranks, at the start of the step. Below 1.0 it needs another forward pass."""

    kl: KLConfig | None = Field(None, json_schema_extra=common("Training"))
    """KL penalty towards a reference model (`reference`); None adds none."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses log-probabilities of a reference model."""
        return self.kl is not None


class _Clip(_Loss):
    eps_low: float = Field(0.2, ge=0, le=1)
    """Lower bound 1 - eps_low of the ratio."""

    eps_high: float = Field(0.2, ge=0)
    """Upper bound 1 + eps_high of the ratio; larger than eps_low is DAPO's clip-higher."""


class AIPOLossConfig(_Loss):
    """AIPO: token-level importance sampling with an upper bound of the ratio."""

    type: Literal["aipo"] = "aipo"

    ratio_clip: float = Field(8.0, gt=0)
    """Upper bound delta of the importance ratio trainer / sampler."""


class _DualClip(_Clip):
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the ratio for negative advantages (dual-clip PPO); None sets none."""


class PPOLossConfig(_DualClip):
    """PPO: clipped surrogate, mean over tokens."""

    type: Literal["ppo"] = "ppo"


class GRPOLossConfig(_DualClip):
    """GRPO: clipped surrogate, mean over sequences of their token means (DAPO: normalization token)."""

    type: Literal["grpo"] = "grpo"
    normalization: Normalization = "sequence"


class DrGRPOLossConfig(_DualClip):
    """Dr. GRPO: clipped surrogate, sums of sequences divided by a fixed length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    normalization: Normalization = "fixed"


class GSPOLossConfig(_Clip):
    """GSPO: clipped surrogate with one ratio per sequence, the geometric mean of its token ratios."""

    type: Literal["gspo"] = "gspo"
    normalization: Normalization = "sequence"
    # Narrower than for tokens, because deviations average out over a sequence.
    eps_low: float = Field(3e-4, ge=0, le=1)
    eps_high: float = Field(4e-4, ge=0)


class CISPOLossConfig(_Loss):
    """CISPO: the clipped ratio weights the log-probabilities, so that every token has a gradient."""

    type: Literal["cispo"] = "cispo"

    eps_low: float | None = Field(None, ge=0, le=1)
    """Lower bound 1 - eps_low of the weight; None sets none."""

    eps_high: float = Field(4.0, ge=0)
    """Upper bound 1 + eps_high of the weight."""


class ReinforceLossConfig(_Loss):
    """REINFORCE: advantage times log-probability, without importance ratio (biased off policy)."""

    type: Literal["reinforce"] = "reinforce"


class TISLossConfig(_Loss):
    """Truncated importance sampling: REINFORCE with each token weighted by its truncated ratio."""

    type: Literal["tis"] = "tis"

    ratio_clip: float = Field(2.0, gt=0)
    """Maximum weight."""


class DPPOLossConfig(_Loss):
    """DPPO: importance sampling without tokens whose probability changed too much, plus a squared log-ratio."""

    type: Literal["dppo"] = "dppo"

    dppo_mask_low: float = Field(0.2, ge=0)
    """Maximum decrease of the probability of a token with advantage 0 or less."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """Maximum increase of the probability of a token with positive advantage."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantages."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log-ratio trainer / sampler."""


class IcePopLossConfig(_Loss):
    """IcePop: importance weights without gradient; masks tokens and sequences outside the bounds."""

    type: Literal["icepop"] = "icepop"

    ratio_type: Literal["token", "sequence"] = "token"
    """Weight tokens by their own ratio, or by the product over their sequence."""

    token_mask_low: float = Field(0.125, ge=0)
    """Mask tokens with a ratio trainer / sampler below this."""

    token_mask_high: float = Field(8.0, gt=0)
    """Mask tokens with a ratio above this."""

    geo_mask_low: float = Field(0.1, ge=0)
    """Mask sequences with a geometric mean of ratios below this."""

    geo_mask_high: float = Field(10.0, gt=0)
    """Mask sequences with a geometric mean of ratios above this."""

    sequence_mask_low: float = Field(0.0, ge=0)
    """Mask sequences that contain a token with a ratio below this."""

    sequence_mask_high: float = Field(100.0, gt=0)
    """Mask sequences that contain a token with a ratio above this."""

    sequence_clip_high: float = Field(10.0, gt=0)
    """Maximum weight with ratio_type sequence."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantages."""

    kl_tau: float = Field(0.0, ge=0)
    """Factor of the log-ratio trainer / sampler, subtracted from the advantages."""

    teacher_tau: float = Field(0.0, ge=0)
    """Factor of log(reference / trainer), added to the advantages; needs reference log-probabilities."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses log-probabilities of a reference model."""
        return self.kl is not None or self.teacher_tau > 0


class DecoupledPPOLossConfig(_Clip):
    """Decoupled PPO: surrogate around the weights at the start of the step, weighted for the sampler's difference."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"

    weight_clip: float | None = Field(None, gt=0)
    """Maximum weight proximal / sampler; None sets none."""


class CustomLossConfig(_Loss):
    """A user's function of one packed row."""

    type: Literal["custom"] = "custom"

    import_path: ImportPath = ""
    """The function as package.module:function, importable or in the working directory, or folder/file.py:function."""

    kwargs: dict[str, object] = Field({})
    """Keyword arguments of the function, after the LossInputs."""

    proximal: bool = False
    """Compute the policy's log-probabilities before the first update of each step; with several minibatches this is an
    additional forward pass."""


LossConfig = Annotated[
    AIPOLossConfig
    | PPOLossConfig
    | GRPOLossConfig
    | DrGRPOLossConfig
    | GSPOLossConfig
    | CISPOLossConfig
    | ReinforceLossConfig
    | TISLossConfig
    | DPPOLossConfig
    | IcePopLossConfig
    | DecoupledPPOLossConfig
    | CustomLossConfig,
    Field(discriminator="type"),
]


class ReferenceConfig(BaseConfig):
    """The reference model of a KL penalty or a teacher: frozen, and sharded like the policy.

    If a batch contains log-probabilities of a reference (`ref_logprobs`), those are used.
    """

    shorthand: ClassVar[str | None] = "name"

    name: str | None = None
    """Hugging Face id or local directory, with the tokens of the policy; None is the base model (version 0)."""

    source: Literal["model", "batch"] = "model"
    """Load the model, or require `ref_logprobs` in every batch."""
