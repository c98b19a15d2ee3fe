"""The canary: 64 fixed tokens whose log-probabilities trainer and inference compute independently and compare (I5, I6).

The trainer writes its values into the manifest of each published version, and the server compares them after loading.
For the base model, the server measures them at its start, the orchestrator copies them into batch 0, and the trainer
compares them before step 0. The canary finds errors that hashes of the loaded bytes cannot find, such as tensors loaded
into the wrong place, outdated packed copies, or a different computation of rotary frequencies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_NUM_TOKENS = 64
# In float32, the largest difference is compared: rounding stays far below 1e-4. In half precision, rounding alone
# changes single log-probabilities by 0.02 to 0.07, so the mean is compared, which is smaller and varies little.
_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_HALF = 5e-2


def canary_tokens(vocabulary: int) -> NDArray[np.int64]:
    """Return the [64] token ids for models with a vocabulary of this size."""
    return np.random.default_rng(vocabulary).integers(0, vocabulary, _NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class PolicyCanary:
    """The trainer's log-probabilities of T fixed tokens.

    Attributes:
        token_ids: [T].
        logprobs: [T - 1]; entry i is the log-probability of token i + 1 given the preceding tokens, at temperature 1.
        dtype: dtype of the computation, e.g. "float32", or of the published weights if those have less precision.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    def compare(
        self, measured: Sequence[float], served_dtype: str, tolerance: float | None = None
    ) -> "CanaryComparison":
        """Compare with a server's log-probabilities of the same tokens, [T - 1], or of a prefix of them.

        By default, 1e-4 is accepted for the largest difference if both compute in float32, else 5e-2 for the mean.
        """
        gaps = [abs(mine - theirs) for mine, theirs in zip(self.logprobs, measured, strict=False)]
        largest = max(gaps) if all(gap == gap for gap in gaps) else math.nan
        if served_dtype == self.dtype == "float32":
            return CanaryComparison(largest, "largest", largest, tolerance or _TOLERANCE_FLOAT32)
        return CanaryComparison(largest, "mean", sum(gaps) / len(gaps), tolerance or _TOLERANCE_HALF)


@dataclass(frozen=True, slots=True)
class CanaryComparison:
    """The difference between the log-probabilities of server and trainer.

    Attributes:
        largest: largest absolute difference; nan if any is nan.
        which: the statistic that is compared: "largest" or "mean".
        difference: value of that statistic.
        tolerance: its limit.
    """

    largest: float
    which: str
    difference: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether the difference is within the tolerance; False for nan."""
        return self.difference <= self.tolerance


class _CanaryField(msgspec.Struct):
    canary: PolicyCanary | None = None


def parse_canary(manifest: Mapping[str, Any]) -> PolicyCanary | None:
    """Parse `canary` of a weights manifest: {token_ids, logprobs, dtype}; None if absent. Raises ValueError."""
    canary = msgspec.convert(manifest, _CanaryField).canary
    if canary is not None and not 2 <= len(canary.token_ids) == len(canary.logprobs) + 1:
        raise ValueError(f"canary: {len(canary.token_ids)} token ids and {len(canary.logprobs)} log-probabilities")
    return canary
