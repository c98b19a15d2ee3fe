"""I5, I6: a few fixed tokens whose log-probabilities the trainer publishes and the server computes anew.

Hashes prove that the bytes which were loaded are those that were published. What they cannot see lies behind them: a
tensor that a loader puts into the wrong place, a packed copy that was not made anew, a trainer that wrote other weights
than it trains. The canary sees those: it compares what the two models say.

Where both compute in float32 the largest difference counts, and 1e-4 is far above rounding. In half precision one of 63
log-probabilities is off by 0.02 to 0.07 for rounding alone, the more so the less likely the token, so that the largest
difference would end good runs; the mean is a few times smaller and hardly varies, and it is what counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_HALF = 5e-2


@dataclass(frozen=True, slots=True)
class Canary:
    """The trainer's view of T fixed tokens.

    Attributes:
        token_ids: [T], 64 of them.
        logprobs: [T - 1]; entry i is the log-probability of token i + 1 given those before, temperature 1.
        dtype: in which the trainer computed them, e.g. "float32"; that of the published weights if these are coarser.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    def compare(self, measured: Sequence[float], served_dtype: str, tolerance: float | None = None) -> "Comparison":
        """Compare with log-probabilities [T - 1] of the same tokens, or of the first of them.

        Args:
            measured: the server's.
            served_dtype: in which it computed them.
            tolerance: how large a difference may be; None is 1e-4 for the largest one where both compute in float32,
                else 5e-2 for the mean.
        """
        gaps = [abs(mine - theirs) for mine, theirs in zip(self.logprobs, measured, strict=False)]
        largest = max(gaps) if all(gap == gap for gap in gaps) else math.nan
        if served_dtype == self.dtype == "float32":
            return Comparison(largest, "largest", largest, tolerance or _TOLERANCE_FLOAT32)
        return Comparison(largest, "mean", sum(gaps) / len(gaps), tolerance or _TOLERANCE_HALF)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the server's log-probabilities are from the trainer's.

    Attributes:
        largest: absolute difference, nan if one is.
        which: "largest" or "mean", whichever counts.
        difference: that one.
        tolerance: what it may be.
    """

    largest: float
    which: str
    difference: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether rounding explains the difference; nan does not."""
        return self.difference <= self.tolerance


def parse_canary(manifest: Mapping[str, Any]) -> Canary | None:
    """Read `canary` of a weights manifest: {token_ids, logprobs, dtype}; None if it has none.

    `logprobs` may have an entry for the first token, which has no log-probability and is not looked at.

    Raises:
        ValueError: it is malformed; says how.
    """
    entry = manifest.get("canary")
    if entry is None:
        return None
    try:
        ids = tuple(int(token) for token in entry["token_ids"])
        logprobs = list(entry["logprobs"])
        logprobs = logprobs[1:] if len(logprobs) == len(ids) else logprobs
        canary = Canary(ids, tuple(float(value) for value in logprobs), str(entry["dtype"]).removeprefix("torch."))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"canary: {type(error).__name__}: {error}") from None
    if len(ids) < 2 or len(canary.logprobs) != len(ids) - 1:
        raise ValueError(f"canary: {len(ids)} token ids and {len(canary.logprobs)} log-probabilities")
    return canary
