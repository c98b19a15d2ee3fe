"""pass@k of groups of rollouts, with a bootstrap band over the examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prime_rl.core.pass_at_k import pass_at_k

_NUM_RESAMPLES = 200
_MAX_EXAMPLES = 4096
"""Examples that are resampled; the band of more examples is scaled."""
_QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class PassAtK:
    """A curve.

    Attributes:
        k: the numbers of rollouts, ascending.
        mean: the unbiased estimate of pass@k for each k.
        low, high: 5 % and 95 % quantile of the estimate over resampled examples.
    """

    k: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def pass_at_k_curve(counts: Sequence[tuple[int, int]], seed: int = 0) -> PassAtK:
    """Return the curve of examples with (rollouts, solved rollouts), at least one.

    k is 1, 2, 4, ... and the smallest number of rollouts of an example.
    """
    smallest = min(rollouts for rollouts, _ in counts)
    ks = sorted({*(2**power for power in range(smallest.bit_length())), smallest})
    table = np.array([[pass_at_k(rollouts, solved, k) for k in ks] for rollouts, solved in counts])
    random = np.random.default_rng(seed)
    size = min(len(counts), _MAX_EXAMPLES)
    drawn = table[random.choice(len(counts), size, replace=False)]
    shares = random.multinomial(size, np.full(size, 1 / size), _NUM_RESAMPLES) / size
    # The width of the band is that of all examples.
    deviations = (shares @ drawn - drawn.mean(axis=0)) * np.sqrt(size / len(counts))
    low, high = np.clip(table.mean(axis=0) + np.quantile(deviations, _QUANTILES, axis=0), 0, 1)
    return PassAtK(ks, table.mean(axis=0).tolist(), low.tolist(), high.tolist())
