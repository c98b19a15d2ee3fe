"""A custom advantage: the rank of a rollout in its group, which ignores how far apart the rewards are.

    uv run --extra cpu rl @ configs/reverse_text/cpu.toml --orchestrator.advantage.type custom \
        --orchestrator.advantage.import-path examples.extend.advantage:centred_ranks

An advantage gets the groups of a batch and returns one finite array [G] per group.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prime_rl.orchestrator.algorithms.advantages import Scores


def centred_ranks(groups: Sequence[Scores], scale: float = 1.0) -> list[NDArray[np.float64]]:
    """Return ranks between -scale and scale, float64 [G] per group; equal rewards share their mean rank."""
    return [scale * _ranks(group.rewards) for group in groups]


def _ranks(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (rewards[:, None] > rewards[None, :]).sum(1)
    above = (rewards[:, None] < rewards[None, :]).sum(1)
    return (below - above) / max(1, len(rewards) - 1)
