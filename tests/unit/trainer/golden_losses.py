"""The losses in NumPy, double precision, token by token, written from their formulas.

Each function answers with the losses of all tokens and the gradient of their sum by the trainer's log-probabilities.
"""

from math import exp, inf, isinf, isnan

import numpy as np

LIMIT = 20.0  # of log-ratios
LOWEST = -1e4  # of log-probabilities


def finite(x):
    return min(max(float(x), LOWEST), -LOWEST)


def log_ratio(one, other):
    """The limited difference, and whether it still moves with `one`."""
    if isnan(one) or isnan(other):
        return np.nan, False
    difference = finite(one) - finite(other)
    moves = abs(difference) <= LIMIT and not isinf(one)
    return min(max(difference, -LIMIT), LIMIT), moves


class Row:
    """Inputs as plain lists, and the trained positions of every sequence."""

    def __init__(self, logprobs, sampler, advantages, mask, segments, proximal=None, reference=None):
        self.lp, self.mu, self.A, self.mask, self.segments = logprobs, sampler, advantages, mask, segments
        self.proximal = logprobs if proximal is None else proximal
        self.reference = reference
        self.trained = [t for t in range(len(mask)) if mask[t]]

    def sequence(self, t):
        return [u for u in self.trained if self.segments[u] == self.segments[t]]

    def ratios(self, t):
        return [exp(log_ratio(self.lp[u], self.mu[u])[0]) for u in self.sequence(t)]

    def geometric_mean(self, t):
        return exp(np.mean([log_ratio(self.lp[u], self.mu[u])[0] for u in self.sequence(t)]))

    def each(self, of_token):
        """Collect (loss, slope) of every trained token."""
        losses, slopes = np.zeros(len(self.mask)), np.zeros(len(self.mask))
        for t in self.trained:
            losses[t], slopes[t] = of_token(t)
        return losses, slopes


def surrogate(ratio, moves, advantage, low, high, dual=None):
    """max(-r A, -clip(r) A), at most -dual A where A < 0; the slope is by log r."""
    free, held = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
    inside = 1 - low <= ratio <= 1 + high
    loss, slope = (free, free) if free >= held else (held, free if inside else 0.0)
    if dual is not None and advantage < 0 and -dual * advantage < loss:
        loss, slope = -dual * advantage, 0.0
    return loss, slope if moves else 0.0


def weighted(row, t, weight):
    """-weight * A * logprob with a weight that has no gradient."""
    return -weight * row.A[t] * finite(row.lp[t]), 0.0 if isinf(row.lp[t]) else -weight * row.A[t]


def aipo(row, ratio_clip):
    def token(t):
        log_r, moves = log_ratio(row.lp[t], row.mu[t])
        ratio = exp(log_r)
        return -min(ratio, ratio_clip) * row.A[t], -ratio * row.A[t] if moves and ratio <= ratio_clip else 0.0

    return row.each(token)


def clip(row, eps_low, eps_high, dual_clip=None):
    def token(t):
        log_r, moves = log_ratio(row.lp[t], row.mu[t])
        return surrogate(exp(log_r), moves, row.A[t], eps_low, eps_high, dual_clip)

    return row.each(token)


def gspo(row, eps_low, eps_high):
    def token(t):
        moves = log_ratio(row.lp[t], row.mu[t])[1]
        return surrogate(row.geometric_mean(t), moves, row.A[t], eps_low, eps_high)

    return row.each(token)


def cispo(row, eps_low, eps_high):
    floor = 0.0 if eps_low is None else 1 - eps_low

    def token(t):
        ratio = exp(log_ratio(row.lp[t], row.mu[t])[0])
        return weighted(row, t, min(max(ratio, floor), 1 + eps_high))

    return row.each(token)


def reinforce(row):
    return row.each(lambda t: weighted(row, t, 1.0))


def tis(row, ratio_clip):
    return row.each(lambda t: weighted(row, t, min(exp(log_ratio(row.lp[t], row.mu[t])[0]), ratio_clip)))


def dppo(row, dppo_mask_low, dppo_mask_high, adv_tau, kl_tau):
    def token(t):
        log_r, moves = log_ratio(row.lp[t], row.mu[t])
        moved = exp(min(row.lp[t], 0.0)) - exp(min(row.mu[t], 0.0))
        out = moved > dppo_mask_high if row.A[t] > 0 else moved < -dppo_mask_low
        gain = 0.0 if out else adv_tau * row.A[t] * exp(log_r)
        return -gain + kl_tau * log_r**2, (-gain + 2 * kl_tau * log_r) if moves else 0.0

    return row.each(token)


def icepop(row, **key):
    def token(t):
        log_r, _ = log_ratio(row.lp[t], row.mu[t])
        ratios, geo = row.ratios(t), row.geometric_mean(t)
        kept = (
            key["token_mask_low"] <= exp(log_r) <= key["token_mask_high"]
            and key["geo_mask_low"] <= geo <= key["geo_mask_high"]
            and min(ratios) >= key["sequence_mask_low"]
            and max(ratios) <= key["sequence_mask_high"]
        )
        weight = exp(log_r)
        if key["ratio_type"] == "sequence":
            total = sum(log_ratio(row.lp[u], row.mu[u])[0] for u in row.sequence(t))
            weight = min(exp(min(max(total, -LIMIT), LIMIT)), key["sequence_clip_high"])
        target = key["adv_tau"] * row.A[t] - key["kl_tau"] * log_r
        if key["teacher_tau"]:
            target += key["teacher_tau"] * log_ratio(row.reference[t], row.lp[t])[0]
        slope = -weight * target if kept else 0.0
        return slope * finite(row.lp[t]), 0.0 if isinf(row.lp[t]) else slope

    return row.each(token)


def decoupled_ppo(row, eps_low, eps_high, weight_clip):
    def token(t):
        weight = exp(log_ratio(row.proximal[t], row.mu[t])[0])
        log_u, moves = log_ratio(row.lp[t], row.proximal[t])
        advantage = row.A[t] * min(weight, inf if weight_clip is None else weight_clip)
        return surrogate(exp(log_u), moves, advantage, eps_low, eps_high)

    return row.each(token)


def kl(row, estimator, straight_through):
    def token(t):
        q, moves = log_ratio(row.lp[t], row.reference[t])
        value = {"k1": q, "k2": q**2 / 2, "k3": exp(-q) - 1 + q}[estimator]
        slope = q if straight_through else {"k1": 1.0, "k2": q, "k3": 1 - exp(-q)}[estimator]
        return value, slope if moves else 0.0

    return row.each(token)


def distillation(row, ratio_clip):
    def token(t):
        weight = min(exp(log_ratio(row.lp[t], row.mu[t])[0]), ratio_clip)
        slope = weight * log_ratio(row.lp[t], row.reference[t])[0]
        return slope, 0.0 if isinf(row.lp[t]) else slope

    return row.each(token)


GOLDEN = {
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
