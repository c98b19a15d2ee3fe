"""Keys of `trainer.loss`: which loss, how its tokens are weighed, and a penalty that any of them can have."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig, ImportPath


class KLConfig(BaseConfig):
    """Penalty on the divergence from a reference model, per token, added to the loss."""

    shorthand: ClassVar[str | None] = "coef"

    coef: float = Field(1e-3, ge=0)
    """Factor of the penalty."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator, q = log(trainer / reference): k1 = q, k2 = q^2 / 2, k3 = exp(-q) - 1 + q."""

    straight_through: bool = False
    """Take the gradient of k2, the unbiased one on policy, whichever estimator gives the value."""


class _Loss(BaseConfig):
    """What every loss has."""

    normalization: Literal["token", "sequence", "fixed"] = "token"
    """Weight of a token: 1 / trained tokens, 1 / (sequences * its sequence's trained tokens), or 1 / (sequences *
    fixed_length); counted over the whole minibatch on all ranks."""

    fixed_length: int | None = Field(None, ge=1)
    """Tokens that normalization fixed divides each sequence by; None is model.seq_len, under `rl` the
    orchestrator's seq_len."""

    kl: KLConfig | None = None
    """Penalty on the divergence from a reference model (`reference`); None has none."""

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference model are needed."""
        return self.kl is not None


class _Clip(_Loss):
    eps_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped at 1 - eps_low."""

    eps_high: float = Field(0.2, ge=0)
    """The ratio is clipped at 1 + eps_high; larger than eps_low is DAPO's clip-higher."""


class AIPOLossConfig(_Loss):
    """AIPO: token-level importance sampling with the ratio clipped from above."""

    type: Literal["aipo"] = "aipo"
    """Kind of loss."""

    ratio_clip: float = Field(8.0, gt=0)
    """Upper bound delta of the importance ratio trainer / sampler."""


class _DualClip(_Clip):
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio for negative advantages (dual-clip PPO); None has none."""


class PPOLossConfig(_DualClip):
    """PPO: the clipped surrogate, a mean over tokens."""

    type: Literal["ppo"] = "ppo"
    """Kind of loss."""


class GRPOLossConfig(_DualClip):
    """GRPO: the clipped surrogate, a mean over sequences of their means."""

    type: Literal["grpo"] = "grpo"
    """Kind of loss."""

    normalization: Literal["token", "sequence", "fixed"] = "sequence"
    """As of every loss; sequence is the paper's, token DAPO's."""


class DrGRPOLossConfig(_DualClip):
    """Dr. GRPO: the clipped surrogate, sums of sequences over a fixed length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Kind of loss."""

    normalization: Literal["token", "sequence", "fixed"] = "fixed"
    """As of every loss; fixed is the paper's."""


class GSPOLossConfig(_Clip):
    """GSPO: the clipped surrogate of one ratio for the whole sequence, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    """Kind of loss."""

    normalization: Literal["token", "sequence", "fixed"] = "sequence"
    """As of every loss; sequence is the paper's."""

    eps_low: float = Field(3e-4, ge=0, le=1)
    """The ratio of a sequence is clipped at 1 - eps_low; far narrower than a token's, as its deviations average out."""

    eps_high: float = Field(4e-4, ge=0)
    """The ratio of a sequence is clipped at 1 + eps_high."""


class CISPOLossConfig(_Loss):
    """CISPO: the clipped ratio as a weight of log-probabilities, so that no token is left out."""

    type: Literal["cispo"] = "cispo"
    """Kind of loss."""

    eps_low: float | None = Field(None, ge=0, le=1)
    """The weight is at least 1 - eps_low; None sets no lower bound."""

    eps_high: float = Field(4.0, ge=0)
    """The weight is at most 1 + eps_high."""


class ReinforceLossConfig(_Loss):
    """REINFORCE: advantage times log-probability; no importance ratio, so biased where the sampler differs."""

    type: Literal["reinforce"] = "reinforce"
    """Kind of loss."""


class TISLossConfig(_Loss):
    """Truncated importance sampling: REINFORCE, each token weighed by its ratio, cut at a bound."""

    type: Literal["tis"] = "tis"
    """Kind of loss."""

    ratio_clip: float = Field(2.0, gt=0)
    """Greatest weight."""


class DPPOLossConfig(_Loss):
    """DPPO: importance sampling without tokens whose probability moved too far, and a squared log-ratio."""

    type: Literal["dppo"] = "dppo"
    """Kind of loss."""

    dppo_mask_low: float = Field(0.2, ge=0)
    """Greatest fall of the probability of a token with advantage 0 or less."""

    dppo_mask_high: float = Field(0.2, ge=0)
    """Greatest rise of the probability of a token with positive advantage."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantages."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log-ratio trainer / sampler."""


class IcePopLossConfig(_Loss):
    """IcePop: importance weights without gradient; tokens and sequences outside the bounds are left out."""

    type: Literal["icepop"] = "icepop"
    """Kind of loss."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Weigh tokens by their own ratio, or by the product over their sequence."""

    token_mask_low: float = Field(0.125, ge=0)
    """Leave out tokens whose ratio trainer / sampler is below."""

    token_mask_high: float = Field(8.0, gt=0)
    """Leave out tokens whose ratio is above."""

    geo_mask_low: float = Field(0.1, ge=0)
    """Leave out sequences whose geometric mean of ratios is below."""

    geo_mask_high: float = Field(10.0, gt=0)
    """Leave out sequences whose geometric mean of ratios is above."""

    sequence_mask_low: float = Field(0.0, ge=0)
    """Leave out sequences that have a token with a ratio below."""

    sequence_mask_high: float = Field(100.0, gt=0)
    """Leave out sequences that have a token with a ratio above."""

    sequence_clip_high: float = Field(10.0, gt=0)
    """Greatest weight under ratio_type sequence."""

    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantages."""

    kl_tau: float = Field(0.0, ge=0)
    """Factor of the log-ratio trainer / sampler, taken from the advantages."""

    teacher_tau: float = Field(0.0, ge=0)
    """Factor of log(reference / trainer), added to the advantages; needs reference log-probabilities."""

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference model are needed."""
        return self.kl is not None or self.teacher_tau > 0


class DecoupledPPOLossConfig(_Clip):
    """Decoupled PPO: the surrogate around the weights the step began with, weighed for what the sampler differs."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Kind of loss."""

    weight_clip: float | None = Field(None, gt=0)
    """Greatest weight proximal / sampler; None sets no bound."""


class CustomLossConfig(_Loss):
    """Your own function of one packed row."""

    type: Literal["custom"] = "custom"
    """Kind of loss."""

    import_path: ImportPath = ""
    """Where the function is: package.module:function, importable or in the working directory."""

    kwargs: dict[str, object] = Field({})
    """Keyword arguments of the function, after the LossInputs."""

    proximal: bool = False
    """Compute the policy's log-probabilities before the first update of each step; with several minibatches that is
    one more forward pass."""


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
    """The reference model that a penalty or a teacher's weights compare with: a frozen copy, sharded like the policy.

    A batch that brings log-probabilities of its own (`ref_logprobs`) is compared with those.
    """

    shorthand: ClassVar[str | None] = "name"

    name: str | None = None
    """Hugging Face id or local directory; same tokens as the policy. None is the base model, version 0."""

    source: Literal["model", "batch"] = "model"
    """Load the model, or expect every batch to bring `ref_logprobs`."""
