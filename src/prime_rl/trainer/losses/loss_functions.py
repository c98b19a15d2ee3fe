"""Losses: `LOSSES` by name, user-defined ones by import path, and those in addition to the policy gradient.

The policy gradients are weighed by truncated importance ratios, clipped surrogates, or omit tokens. Each failure of a
user-defined loss becomes a one-line error.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prime_rl.configs.training.loss import CustomLossConfig, LossConfig
from prime_rl.core.errors import ConfigError, RunError, summarize_exception
from prime_rl.core.import_utils import check_call, load_function
from prime_rl.trainer.losses.loss_inputs import (
    Loss,
    LossInputs,
    LossOutput,
    clamped_difference,
    finite,
    log_ratio,
    masked_advantages,
    masked_logprobs,
    sequence_mean,
    sequence_sum,
)

_KEY = "loss.import_path"


def build_loss(config: LossConfig) -> Loss:
    """Bind the loss `config.type` to its keys.

    A user-defined one is `function(inputs: LossInputs, **kwargs)` and returns a `LossOutput` or the losses [T] alone.
    With `proximal`, `inputs.proximal_logprobs` is also set before the first update: the trainer's own logprobs.

    Raises:
        ConfigError: a user-defined loss cannot be loaded. The returned loss raises it if the function raises or does
            not return a loss.
    """
    if isinstance(config, CustomLossConfig):
        function = load_function(config.import_path, _KEY)
        check_call(function, 1, config.kwargs, f"{_KEY} = {config.import_path!r}")
        return partial(_call_custom_loss, function, config)
    keys = config.model_dump(exclude={"normalization", "fixed_length", "kl", "entropy_coef", "top_entropy_quantile"})
    return partial(LOSSES[keys.pop("type")], **keys)


def _call_custom_loss(function: Callable[..., Any], config: CustomLossConfig, inputs: LossInputs) -> LossOutput:
    name = config.import_path
    if config.proximal and inputs.proximal_logprobs is None:
        inputs = replace(inputs, proximal_logprobs=inputs.logprobs.detach())
    try:
        answer = function(inputs, **config.kwargs)
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


def aipo(inputs: LossInputs, *, ratio_clip: float) -> LossOutput:
    """Per token -min(r, c) * A, with r = exp(trainer logprob - sampler logprob) and c = `ratio_clip`.

    The gradient is zero where r exceeds c. Named after LlamaRL's asynchronous importance weighted policy optimisation
    (arXiv:2505.24034), whose update min(r, c) A grad logprob is that of `tis`: there, such a token has a gradient of
    weight c. This form is that of early prime-rl, per token and without KL and entropy terms.
    """
    ratio = log_ratio(inputs).exp()
    return LossOutput.unmasked(
        -ratio.clamp(max=ratio_clip) * masked_advantages(inputs), high=inputs.mask & (ratio > ratio_clip)
    )


def cispo(inputs: LossInputs, *, eps_low: float | None, eps_high: float) -> LossOutput:
    """Per token -sg(clip(r, 1 - eps_low, 1 + eps_high)) * A * logprob, where sg stops the gradient.

    `eps_low` None sets no lower bound, as the paper's authors train. Clipped IS-weight policy optimisation of
    MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
    """
    return _weighted_policy_gradient(inputs, 0.0 if eps_low is None else 1 - eps_low, 1 + eps_high)


def tis(inputs: LossInputs, *, ratio_clip: float) -> LossOutput:
    """Per token -sg(min(r, c)) * A * logprob, with r = trainer / sampler and c = `ratio_clip`; sg stops the gradient.

    Truncated importance sampling (Ionides 2008, doi:10.1198/106186008X320456), as the rho of V-trace in IMPALA
    (arXiv:1802.01561, equation 1). For language models: Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training", whose form with a PPO ratio is `decoupled_ppo` with a `weight_clip`.
    """
    return _weighted_policy_gradient(inputs, 0.0, ratio_clip)


def reinforce(inputs: LossInputs) -> LossOutput:
    """Per token -A * logprob, without an importance ratio: biased where the tokens are off-policy.

    Williams 1992 (doi:10.1007/BF00992696).
    """
    return LossOutput.unmasked(-masked_advantages(inputs) * masked_logprobs(inputs))


def _weighted_policy_gradient(inputs: LossInputs, low: float, high: float) -> LossOutput:
    ratio = log_ratio(inputs).exp().detach()
    loss = -ratio.clamp(low, high) * masked_advantages(inputs) * masked_logprobs(inputs)
    return LossOutput.unmasked(loss, inputs.mask & (ratio < low), inputs.mask & (ratio > high))


def clip(inputs: LossInputs, *, eps_low: float, eps_high: float, dual_clip: float | None) -> LossOutput:
    """Per token max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), with r = exp(trainer logprob - sampler logprob).

    With `dual_clip` = c, the loss of a token with A < 0 is at most c |A|.

    PPO (arXiv:1707.06347, equation 7) as used by GRPO (arXiv:2402.03300, equation 3). Separate bounds are DAPO's
    clip-higher (arXiv:2503.14476, section 3.1), the third bound is dual-clip PPO (arXiv:1912.09729).
    """
    return _clipped_surrogate(
        log_ratio(inputs).exp(), masked_advantages(inputs), inputs.mask, eps_low, eps_high, dual_clip
    )


def gspo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> LossOutput:
    """Per token max(-s_t A, -clip(s_t, 1 - eps_low, 1 + eps_high) A), where s_t has the value of the sequence's ratio.

    s = exp(mean over the sequence's trained tokens of (trainer logprob - sampler logprob)), and
    s_t = sg(s) * exp(log r_t - sg(log r_t)) with r_t the token's ratio; sg stops the gradient. With one advantage per
    sequence and sequence normalisation, value and gradient are those of the sequence-level objective. Advantages may
    also differ by token.

    Group sequence policy optimisation (arXiv:2507.18071); s_t is its GSPO-token.
    """
    token = log_ratio(inputs)
    sequence = sequence_mean(token, inputs.mask, inputs.segment_ids).detach()
    ratio = (sequence + token - token.detach()).exp()
    return _clipped_surrogate(ratio, masked_advantages(inputs), inputs.mask, eps_low, eps_high)


def decoupled_ppo(inputs: LossInputs, *, eps_low: float, eps_high: float, weight_clip: float | None) -> LossOutput:
    """Per token w * max(-u A, -clip(u, 1 - eps_low, 1 + eps_high) A), u = trainer / proximal, w = proximal / sampler.

    The proximal policy is the trainer's before the first update of the step. w is at most `weight_clip`; None sets no
    bound. Before the first update u is 1, and the gradient is that of importance sampling with weight w.

    Hilton et al., Batch size-invariance for policy optimization (arXiv:2110.00641), the decoupled clipped
    objective; in AReaL (arXiv:2505.24298, section 5.2) for asynchronous training of language models.
    """
    proximal = inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    weight = clamped_difference(proximal, inputs.sampler_logprobs, inputs.mask).exp()
    ratio = clamped_difference(inputs.logprobs, proximal, inputs.mask).exp()
    if weight_clip is not None:
        weight = weight.clamp(max=weight_clip)
    return _clipped_surrogate(ratio, weight * masked_advantages(inputs), inputs.mask, eps_low, eps_high)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> LossOutput:
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    negative = advantages < 0
    low = mask & negative & (ratio < 1 - eps_low)
    high = mask & (advantages > 0) & (ratio > 1 + eps_high)
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
        high = high | (mask & negative & (ratio > dual_clip))
    return LossOutput.unmasked(loss, low, high)


def icepop(
    inputs: LossInputs,
    *,
    ratio_type: str,
    token_mask_low: float,
    token_mask_high: float,
    geo_mask_low: float,
    geo_mask_high: float,
    sequence_mask_low: float,
    sequence_mask_high: float,
    sequence_clip_high: float,
    adv_tau: float,
    kl_tau: float,
    teacher_tau: float,
) -> LossOutput:
    """Per token -keep * sg(rho * (A' - kl_tau * log r)) * logprob, where sg stops the gradient.

    r is the token's ratio trainer / sampler, geo the geometric mean of r over the sequence's trained tokens. A token is
    kept if r is within the token bounds, geo within the geo bounds, and all r of its sequence within the sequence
    bounds. rho is r, or with `ratio_type` "sequence" the product of r over the sequence, clipped at
    `sequence_clip_high`. A' = adv_tau * A + teacher_tau * (reference logprob - trainer logprob).

    IcePop (arXiv:2510.18855) masks by token; the masks by sequence and the terms in A' are additions.
    """
    difference = log_ratio(inputs).detach()
    ratio, mask = difference.exp(), inputs.mask
    geo = sequence_mean(difference, mask, inputs.segment_ids).exp()
    least, greatest = _extremes(ratio, mask, inputs.segment_ids)
    low = mask & ((ratio < token_mask_low) | (geo < geo_mask_low) | (least < sequence_mask_low))
    high = mask & ((ratio > token_mask_high) | (geo > geo_mask_high) | (greatest > sequence_mask_high))
    if ratio_type == "sequence":
        # Clamped again: exp of a sum over many tokens would overflow.
        total = sequence_sum(difference, inputs.segment_ids).clamp(-20.0, 20.0)
        ratio = total.exp().clamp(max=sequence_clip_high)
    target = adv_tau * masked_advantages(inputs) - kl_tau * difference
    if teacher_tau:
        if inputs.ref_logprobs is None:
            raise RunError(
                "loss.teacher_tau > 0 needs a reference model, but the batch has no ref_logprobs; set reference.name"
            )
        target = target + teacher_tau * clamped_difference(inputs.ref_logprobs, inputs.logprobs.detach(), mask)
    dropped = low | high
    weight = torch.where(dropped, 0.0, ratio * target)
    return LossOutput(-weight * masked_logprobs(inputs), low, high, dropped)


def dppo(
    inputs: LossInputs, *, dppo_mask_low: float, dppo_mask_high: float, adv_tau: float, kl_tau: float
) -> LossOutput:
    """Per token -keep * adv_tau * A * r + kl_tau * (trainer logprob - sampler logprob)^2.

    d = trainer probability - sampler probability. The first term omits tokens with A > 0 and d > `dppo_mask_high`, or
    A <= 0 and d < -`dppo_mask_low`; the second term includes all tokens. r is not clipped.

    Divergence PPO with the binary total variation (arXiv:2602.04879). The squared log-ratio is the
    regulariser of Kimi k1.5 (arXiv:2501.12599, section 2.3.2).
    """
    difference = log_ratio(inputs)
    trainer, sampler = (x.detach().clamp(max=0.0).exp() for x in (inputs.logprobs, inputs.sampler_logprobs))
    moved = trainer - sampler
    advantages = masked_advantages(inputs)
    high = inputs.mask & (advantages > 0) & (moved > dppo_mask_high)
    low = inputs.mask & (advantages <= 0) & (moved < -dppo_mask_low)
    kept = torch.where(low | high, 0.0, difference.exp() * advantages)
    return LossOutput(-adv_tau * kept + kl_tau * difference.square(), low, high, low | high)


def _extremes(ratio: Tensor, mask: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token the least and the greatest ratio among the trained tokens of its segment."""
    ones = torch.ones_like(ratio)  # outside the mask the ratio is 1, which must not count as a trained one
    least = ones.scatter_reduce(0, segment_ids, torch.where(mask, ratio, torch.inf), "amin", include_self=False)
    greatest = ones.scatter_reduce(0, segment_ids, torch.where(mask, ratio, 0.0), "amax", include_self=False)
    return least[segment_ids], greatest[segment_ids]


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "aipo": aipo,
    "ppo": clip,
    "grpo": clip,
    "dr_grpo": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "tis": tis,
    "dppo": dppo,
    "icepop": icepop,
    "decoupled_ppo": decoupled_ppo,
}
"""By `loss.type`. Each is a function of `LossInputs` whose keyword arguments are its configuration keys."""


def cross_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per token [T] -logprob, 0 outside the mask (bool [T])."""
    return torch.where(mask, -finite(logprobs), 0.0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str, straight_through: bool) -> Tensor:
    """Estimate KL(trainer || reference) per token [T], 0 outside the mask.

    With q = log(trainer / reference) of the token: k1 = q, k2 = q^2 / 2, k3 = exp(-q) - 1 + q
    (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html). With `straight_through` the
    gradient is that of k2, whose expectation on policy is the gradient of the KL. (For k1 it is 0, for k3 the gradient
    of KL(reference || trainer).) With the differentiable importance ratio trainer / sampler as a factor, k3 and its
    gradient estimate KL and its gradient without bias off policy (DeepSeek-V3.2, arXiv:2512.02556, equation 7).
    """
    q = clamped_difference(logprobs, ref_logprobs, mask)
    k2 = q.square() / 2
    value = {"k1": q, "k2": k2, "k3": torch.expm1(-q) + q}[estimator]
    return value.detach() + k2 - k2.detach() if straight_through else value


def distillation(
    logprobs: Tensor, sampler_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ratio_clip: float
) -> Tensor:
    """Reverse KL to a teacher on the policy's own samples, per token [T], 0 outside the mask.

    Value min(r, c) * q with q = log(trainer / teacher), r = trainer / sampler and c = `ratio_clip`. The gradient,
    min(r, c) * q * grad logprob, is the policy gradient with reward -q.

    On-policy distillation: GKD (arXiv:2306.13649, with lambda = 1 and the reverse KL).
    """
    q = clamped_difference(logprobs, ref_logprobs, mask).detach()
    ratio = clamped_difference(logprobs, sampler_logprobs, mask).detach().exp().clamp(max=ratio_clip)
    trained = torch.where(mask, finite(logprobs), 0.0)
    return ratio * q * (1 + trained - trained.detach())
