"""The answers of the contract engine: a pure function of prompt, seed and version, with a reward that rises.

Each token of a batch can therefore be checked against its version tag (I5), and a run with faults must end with the
reward of a run without.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

END = 2
"""Id of `<|im_end|>`."""
GOOD, OTHERS = 72, range(73, 98)
"""Ids of `a` and of `b` to `z` in the tokenizer of `tests.support.tiny_model`."""
LOGPROB = -4.6
_LEAST, _MOST, _GAIN = 0.15, 0.9, 0.05
_SHORTEST, _LONGEST = 3, 9


def skill(version: int) -> float:
    """Probability that a letter is an `a`."""
    return min(_MOST, _LEAST + _GAIN * version)


def completion_length(prompt: Sequence[int], seed: int) -> int:
    """Number of letters of a completion, without the end."""
    return int(_draws(prompt, seed)[0] * (_LONGEST - _SHORTEST + 1)) + _SHORTEST


def complete(prompt: Sequence[int], seed: int, versions: Sequence[int]) -> list[int]:
    """Return the tokens of a completion, given the version of each token; the last is `END`.

    Args:
        prompt: token ids.
        seed: of the request.
        versions: as many as the completion has tokens (`completion_length` and the end).
    """
    draws = _draws(prompt, seed)
    letters = [
        GOOD if draws[1 + index] < skill(version) else OTHERS[int(draws[1 + index] * 1e6) % len(OTHERS)]
        for index, version in enumerate(versions[:-1])
    ]
    return [*letters, END]


def rollout_seed(sampling_seed: int, group_id: int, rollout: int) -> int:
    """The seed of the request for a rollout of the first environment's only turn."""
    return int(np.random.SeedSequence([sampling_seed, 0, group_id, rollout, 0]).generate_state(1)[0])


def _draws(prompt: Sequence[int], seed: int) -> NDArray[np.float64]:
    return np.random.default_rng([zlib.crc32(np.asarray(prompt, np.int32).tobytes()), seed]).random(_LONGEST + 1)
