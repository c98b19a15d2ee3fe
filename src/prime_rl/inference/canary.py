"""I5, I6: a few fixed tokens whose log-probabilities the trainer publishes and the server computes anew.

Hashes prove that the bytes which were loaded are those that were published. What they cannot see lies behind them: a
tensor that a loader puts into the wrong place, a packed copy that was not made anew, a trainer that wrote other weights
than it trains. The canary sees those: it compares what the two models say.
"""

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
        dtype: in which the trainer computed them, e.g. "float32".
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    def difference(self, measured: Sequence[float]) -> float:
        """The largest absolute difference to log-probabilities [T - 1] of the same tokens; nan if one is."""
        gaps = [abs(mine - theirs) for mine, theirs in zip(self.logprobs, measured, strict=True)]
        return max(gaps) if all(gap == gap for gap in gaps) else float("nan")

    def tolerance(self, served_dtype: str) -> float:
        """The largest difference that rounding explains: 1e-4 if both sides compute in float32, else 5e-2."""
        exact = served_dtype == self.dtype == "float32"
        return _TOLERANCE_FLOAT32 if exact else _TOLERANCE_HALF


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
