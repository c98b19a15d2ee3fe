"""The unbiased estimates of pass@k and pass^k."""

import math

REWARD_TOLERANCE = 1e-6
"""Rewards are sums of weighted scores: 0.7 + 0.2 + 0.1 is slightly below 1 in floating point."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k rollouts is correct.

    1 - C(n - c, k) / C(n, k), n rollouts of an example, c of them correct, 1 <= k <= n; Chen et al. 2021
    (arXiv 2107.03374), section 2.1. Computed with integers, so only the result is rounded.

    Raises:
        ValueError: `correct` or `k` is out of range.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} is not defined for {correct} correct of {n} rollouts")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - correct, k)) / subsets


def pass_hat_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that all of k rollouts are correct.

    C(c, k) / C(n, k), n rollouts of an example, c of them correct, 1 <= k <= n; Yao et al. 2024 (arXiv 2406.12045),
    section 3.

    Raises:
        ValueError: `correct` or `k` is out of range.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass^{k} is not defined for {correct} correct of {n} rollouts")
    return math.comb(correct, k) / math.comb(n, k)
