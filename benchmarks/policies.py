"""Policies that admit groups and form batches, with the interface of `DeadlineScheduler`.

Each is a minimal implementation of the published rule of a project, without our invariants.
"""

import math
from typing import Protocol


class Scheduler(Protocol):
    """The scheduler interface of an orchestrator."""

    batch_groups: int
    next_step: int

    @property
    def placed(self) -> int:
        """Groups that were shipped, or admitted and not dropped."""

    def can_admit(self, version: int) -> bool:
        """Return whether a group may start while inference samples from `version`."""

    def admit(self, group_id: int, version: int) -> int:
        """Start a group."""

    def complete(self, group_id: int) -> None:
        """Record that a group is finished."""

    def drop(self, group_id: int) -> None:
        """Forget a group."""

    def ready(self) -> list[int] | None:
        """Choose the next batch, or None."""

    def ship(self, group_ids: list[int]) -> None:
        """Record that the batch was shipped."""


class Baseline:
    """Takes the first B complete groups. Subclasses decide when a group may start and a batch may ship."""

    def __init__(self, batch_groups: int, async_level: int) -> None:
        self.batch_groups = batch_groups
        self.async_level = async_level
        self.next_step = 0
        self.version = 0
        self.started: dict[int, int] = {}
        self.completed: list[int] = []
        self.discarded: list[int] = []

    @property
    def placed(self) -> int:
        """Groups that were shipped, or admitted and not dropped."""
        return self.next_step * self.batch_groups + len(self.started)

    def can_admit(self, version: int) -> bool:
        """Return whether a group may start while inference samples from `version`."""
        self.version = version
        return self.may_start()

    def admit(self, group_id: int, version: int) -> int:
        """Start a group."""
        self.started[group_id] = version
        return version + self.async_level

    def complete(self, group_id: int) -> None:
        """Record that a group is finished."""
        self.completed.append(group_id)

    def drop(self, group_id: int) -> None:
        """Forget a group."""
        del self.started[group_id]

    def ready(self) -> list[int] | None:
        """Choose the next batch, or None."""
        if not self.may_ship() or len(self.completed) < self.batch_groups:
            return None
        return self.completed[: self.batch_groups]

    def ship(self, group_ids: list[int]) -> None:
        """Record that the batch was shipped."""
        self.next_step += 1
        shipped = set(group_ids)
        self.completed = [group_id for group_id in self.completed if group_id not in shipped]
        for group_id in group_ids:
            self.started.pop(group_id, None)

    def may_start(self) -> bool:
        """Return whether a group may start at `version`."""
        return True

    def may_ship(self) -> bool:
        """Return whether the next batch may ship if enough groups are complete."""
        return True


class Synchronous(Baseline):
    """Version n samples the whole batch n."""

    def may_start(self) -> bool:  # noqa: D102
        return self.placed < (min(self.version, self.next_step) + 1) * self.batch_groups


class OneStepOff(Baseline):
    """Version n - 1 samples the whole batch n during the training on batch n - 1 (verl's one-step-off recipe)."""

    def may_start(self) -> bool:  # noqa: D102
        batch = self.placed // self.batch_groups
        return batch <= min(self.next_step, self.version + 1)


class AdmissionGate(Baseline):
    """Starts at most (k + v + 1) * B groups; batches take them as they complete (AReaL, SkyRL)."""

    def may_start(self) -> bool:  # noqa: D102
        return self.placed < (self.version + self.async_level + 1) * self.batch_groups


class StrictFifo(AdmissionGate):
    """The same gate, but batches take groups in the order in which they started."""

    def ready(self) -> list[int] | None:  # noqa: D102
        oldest = list(self.started)[: self.batch_groups]
        complete = set(self.completed)
        return oldest if len(oldest) == self.batch_groups and complete.issuperset(oldest) else None


class WindowedFifo(AdmissionGate):
    """The same gate; batches take the oldest complete groups of the 30 % that started first (torchtitan, MiniMax).

    The window starts at the oldest group that is not in a batch yet.
    """

    WINDOW_SHARE = 0.3

    def __init__(self, batch_groups: int, async_level: int) -> None:
        super().__init__(batch_groups, async_level)
        self.window = max(1, int(self.WINDOW_SHARE * (async_level + 1) * batch_groups))
        self.places: dict[int, int] = {}

    @property
    def bound(self) -> int:
        """The maximum staleness of the window."""
        return self.async_level + math.ceil((self.window - 1) / self.batch_groups)

    def admit(self, group_id: int, version: int) -> int:  # noqa: D102
        self.places[group_id] = len(self.places)
        return super().admit(group_id, version)

    def ready(self) -> list[int] | None:  # noqa: D102
        if len(self.completed) < self.batch_groups:
            return None
        waiting = sorted(self.started, key=self.places.__getitem__)
        complete, batch = set(self.completed), []
        while waiting and len(batch) < self.batch_groups:
            end = self.places[waiting[0]] + self.window
            taken = next((g for g in waiting if g in complete and self.places[g] < end), None)
            if taken is None:
                return None
            batch.append(taken)
            waiting.remove(taken)
        return batch if len(batch) == self.batch_groups else None


class Discard(Baseline):
    """Keeps all slots busy and discards groups older than k when a batch is formed (TRL, NeMo-RL and others).

    A batch is formed when the trainer requests it.
    """

    LAG = 0
    """Batches that may be shipped ahead of the version that is sampled from."""

    def may_ship(self) -> bool:  # noqa: D102
        if self.next_step - self.version > self.LAG:
            return False
        stale = {g for g in self.completed if self.next_step - self.started[g] > self.async_level}
        self.discarded += sorted(stale)
        self.completed = [g for g in self.completed if g not in stale]
        for group_id in stale:
            del self.started[group_id]
        return True


class ShipHold(Discard):
    """Pauses dispatch while more than one batch is ahead of the trainer; discards stale groups (prime-rl, 2026).

    There the lag of one batch is constant, and the default of k (`max_off_policy_steps`) is 8.
    """

    LAG = 1

    def may_start(self) -> bool:  # noqa: D102
        return self.next_step - self.version <= self.LAG
