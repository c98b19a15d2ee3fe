"""Rewards of a group to advantages, one function an algorithm, registered by name."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prime_rl.configs.orchestrator import GRPOAdvantageConfig

Advantage = Callable[[NDArray[np.float64]], NDArray[np.float64]]

_STD_FLOOR = 1e-6


def grpo(rewards: NDArray[np.float64], std: bool = False) -> NDArray[np.float64]:
    """Return A_i = R_i - mean(R), divided by the group's standard deviation if `std`.

    Group relative policy optimisation (Shao et al. 2024, DeepSeekMath, section 4.1.2); without the division as in
    Dr. GRPO (Liu et al. 2025, section 3.1).

    Args:
        rewards: float64 [G].
        std: divide by the standard deviation (plus 1e-6).

    Returns:
        float64 [G]; zeros where all rewards are equal.
    """
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + _STD_FLOOR) if std else centred


def advantage_function(config: GRPOAdvantageConfig) -> Advantage:
    """Return the advantage that `config` describes."""
    return partial(grpo, std=config.std)
