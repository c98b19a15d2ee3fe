"""The canary: 64 fixed tokens whose log-probabilities trainer and inference compute independently and compare (I5, I6).

The trainer writes its values into the manifest of each published version, and the server compares them after loading.
For the base model, the server measures them at its start, the orchestrator copies them into batch 0, and the trainer
compares them before step 0. The canary finds errors that hashes of the loaded bytes cannot find, such as tensors loaded
into the wrong place, outdated packed copies, or a different computation of rotary frequencies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_NUM_TOKENS = 64
# In float32, the largest difference is compared: rounding rarely reaches 1e-4. Where it does, single tokens differ, and
# the mean stays below 7e-6 (docs/design/weight_sync.md). In half precision, rounding alone changes single
# log-probabilities by 0.02 to 0.07, so the mean is compared, which is smaller and varies little.
# Rounding grows with the number of layers and with the scale of the logits, so a larger mean is accepted if the base
# model, too, has a larger one. The limits of that are fractions of the spread of the log-probabilities: bf16 makes
# 0.006 to 0.03 of it, fp8 weights 0.02 to 0.13, two exchanged layers at least 0.3 (docs/design/weight_sync.md).
_TOLERANCE_FLOAT32, _MEAN_FLOAT32 = 1e-4, 1e-5
_TOLERANCE_HALF = 5e-2
_BASE_FACTOR = 3.0
_PLAIN_FRACTIONS, _QUANTIZED_FRACTIONS = (0.1, 0.25), (0.3, 0.4)  # of the base model, and of a version
_PLAIN = ("float32", "bfloat16", "float16")


def canary_tokens(vocabulary: int) -> NDArray[np.int64]:
    """Return the [64] token ids for models with a vocabulary of this size."""
    return np.random.default_rng(vocabulary).integers(0, vocabulary, _NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class PolicyCanary:
    """The trainer's log-probabilities of T fixed tokens.

    Attributes:
        token_ids: [T].
        logprobs: [T - 1]; entry i is the log-probability of token i + 1 given the preceding tokens, at temperature 1.
        dtype: dtype of the computation, e.g. "float32", or of the published weights if those have less precision. That
            of a server with quantized weights is the quantization, e.g. "fp8".
        base_logprobs: the same for the trainer's base model; empty if it was not measured.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str
    base_logprobs: tuple[float, ...] = ()

    def compare(
        self,
        measured: Sequence[float],
        served_dtype: str,
        tolerance: float | None = None,
        served_base: "PolicyCanary | None" = None,
    ) -> "CanaryComparison":
        """Compare with a server's log-probabilities of the same tokens, [T - 1], or of a prefix of them.

        By default, 1e-4 is accepted for the largest difference or 1e-5 for the mean if both compute in float32, else
        5e-2 for the mean, or three times the mean difference of the base models. `served_base` is the server's canary
        of its base model.
        """
        largest, mean = _differences(self.logprobs, measured)
        if served_dtype == self.dtype == "float32" and (served_base is None or served_base.dtype == "float32"):
            if tolerance is None and largest > _TOLERANCE_FLOAT32 and mean <= _MEAN_FLOAT32:
                return CanaryComparison(largest, "mean", mean, _MEAN_FLOAT32)
            return CanaryComparison(largest, "largest", largest, tolerance or _TOLERANCE_FLOAT32)
        limit = max(_TOLERANCE_HALF, self._limit_by_base(served_base))
        return CanaryComparison(largest, "mean", mean, tolerance or limit)

    def compare_base(self, served: "PolicyCanary", tolerance: float | None = None) -> "CanaryComparison":
        """Compare this canary of the trainer's base model with that of a server.

        In float32 the limits are those of `compare`. Else 5e-2 is accepted for the mean, or a tenth of the spread of
        the log-probabilities; three tenths with quantized weights.
        """
        compared = self.compare(served.logprobs, served.dtype, tolerance)
        if tolerance is not None or served.dtype == self.dtype == "float32":
            return compared
        return replace(compared, tolerance=_base_limit(self.logprobs, served.dtype))

    def _limit_by_base(self, served: "PolicyCanary | None") -> float:
        """The limit by the difference of the base models; 0 if that is not known, or more than rounding."""
        if served is None or served.token_ids != self.token_ids or not self.base_logprobs:
            return 0.0
        _, difference = _differences(self.base_logprobs, served.logprobs)
        if not difference <= _base_limit(self.base_logprobs, served.dtype):
            return 0.0
        return min(_BASE_FACTOR * difference, _fractions(served.dtype)[1] * _spread(self.logprobs))


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


def _differences(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the largest and the mean absolute difference; the largest is nan if any is."""
    gaps = [abs(one - other) for one, other in zip(mine, theirs, strict=False)]
    return (max(gaps) if all(gap == gap for gap in gaps) else math.nan), sum(gaps) / len(gaps)


def _spread(logprobs: Sequence[float]) -> float:
    """Return the mean absolute difference between log-probabilities of different tokens, about that of any weights."""
    values = np.array(logprobs)
    return float(np.abs(values[:, None] - values).sum() / max(len(values) * (len(values) - 1), 1))


def _base_limit(logprobs: Sequence[float], dtype: str) -> float:
    return max(_TOLERANCE_HALF, _fractions(dtype)[0] * _spread(logprobs))


def _fractions(served_dtype: str) -> tuple[float, float]:
    return _PLAIN_FRACTIONS if served_dtype in _PLAIN else _QUANTIZED_FRACTIONS


class _CanaryField(msgspec.Struct):
    canary: PolicyCanary | None = None


def parse_canary(manifest: Mapping[str, Any]) -> PolicyCanary | None:
    """Parse `canary` of a weights manifest, the fields of `PolicyCanary`; None if absent. Raises ValueError."""
    canary = msgspec.convert(manifest, _CanaryField).canary
    if canary is not None and not 2 <= len(canary.token_ids) == len(canary.logprobs) + 1:
        raise ValueError(f"canary: {len(canary.token_ids)} token ids and {len(canary.logprobs)} log-probabilities")
    return canary
