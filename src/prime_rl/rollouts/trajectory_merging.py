"""Merges the turns of a rollout into samples: turns that extend each other exactly share one sample."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.types import Sample
from prime_rl.rollouts.replies import Generation, GrowingSequence, Turn

Mask = bool | NDArray[np.bool_]
"""Which sampled tokens of a turn are trained on: all, none, or one entry per token."""


class SampleBuilder:
    """Makes samples from the turns of one rollout. The ids of a conversation are stored once.

    A turn extends an earlier one if its prompt starts with all ids of that turn. The ids between them come from the
    environment and are masked. Any other prompt starts a new sample, so every trained token keeps the context in which
    it was sampled. If two turns extend the same turn, the first one's sample contains it. With `branching`, every turn
    becomes a separate sample.
    """

    def __init__(self, branching: bool = False) -> None:
        self._sequences: dict[GrowingSequence, list[Turn]] = {}
        self._turns: list[Turn] = []
        self._branching = branching

    def add(self, prompt_ids: NDArray[np.int32], generation: Generation) -> Turn:
        """Add the completion of `prompt_ids` (int32)."""
        ids = np.concatenate([prompt_ids, generation.token_ids])
        parent = None if self._branching else self._find_parent(prompt_ids)
        if parent is not None and parent.end == len(parent.sequence.ids):
            sequence = parent.sequence
            sequence.ids = ids
        else:
            sequence = GrowingSequence(ids)
        turn = Turn(sequence, len(prompt_ids), generation, parent)
        self._sequences.setdefault(sequence, []).append(turn)
        self._turns.append(turn)
        return turn

    def samples(
        self, trained: Callable[[Turn], Mask] = lambda _: True, credits: Mapping[Turn, int] | None = None
    ) -> tuple[Sample, ...]:
        """Return the samples. Each trained token is in exactly one of them.

        Other tokens are masked if trained tokens follow, and removed otherwise. `credits` has the index of each turn's
        credit, if turns are credited separately.
        """
        masks = {turn: mask for turn in self._turns if (mask := trained(turn)) is True or np.any(mask)}
        inner = {ancestor for turn in masks for ancestor in _ancestors(turn)}
        remaining = dict(masks)
        paths = []
        for last in masks:
            if last not in inner:
                path = [turn for turn in [last, *_ancestors(last)] if turn in remaining]
                paths.append([(turn, remaining.pop(turn)) for turn in reversed(path)])
        order = {turn: number for number, turn in enumerate(masks)}
        return tuple(_sample(path, credits) for path in sorted(paths, key=lambda path: order[path[0][0]]))

    def _find_parent(self, prompt_ids: NDArray[np.int32]) -> Turn | None:
        """Return the longest turn whose ids the prompt starts with."""
        best = None
        for sequence, turns in self._sequences.items():
            length = min(len(prompt_ids), len(sequence.ids))
            differs = prompt_ids[:length] != sequence.ids[:length]
            common = int(differs.argmax()) if differs.any() else length
            found = next((turn for turn in reversed(turns) if turn.end <= common), None)
            if found is not None and (best is None or found.end >= best.end):
                best = found
        return best


def _ancestors(turn: Turn) -> Iterator[Turn]:
    while turn.parent is not None:
        turn = turn.parent
        yield turn


def _sample(turns: list[tuple[Turn, Mask]], credits: Mapping[Turn, int] | None) -> Sample:
    """Return the sample that ends with the last of `turns` and trains on all of them."""
    last, _ = turns[-1]
    loss_mask, logprobs = np.zeros(last.end, np.bool_), np.zeros(last.end, np.float32)
    versions = np.full(last.end, -1, np.int32)
    owners = None if credits is None else np.zeros(last.end, np.int32)
    for turn, mask in turns:
        span = slice(turn.start, turn.end)
        loss_mask[span] = mask
        if credits is not None and owners is not None:
            owners[span] = credits[turn]
        logprobs[span], versions[span] = turn.generation.logprobs, turn.generation.versions
        if mask is not True:
            logprobs[span][~loss_mask[span]], versions[span][~loss_mask[span]] = 0, -1
    return Sample(last.sequence.ids[: last.end], loss_mask, logprobs, versions, owners)
