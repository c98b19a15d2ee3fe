"""I1 bound and I2 nothing wasted: which group may start, and which groups make batch n."""

from dataclasses import dataclass

UNBOUNDED = float("inf")


@dataclass(slots=True)
class _Entry:
    deadline: int
    complete: bool = False


class DeadlineScheduler:
    """Admits groups and picks batches so that no token of batch n is older than version n - k. No I/O, no clock.

    A group that starts while its server samples from version v gets the deadline d = v + k, the last batch it may join:
    all its tokens come from version v or newer, so in batch n <= d no token is staler than n - v <= k. The bound then
    holds by construction if every group ships by its deadline, and every group can, if the batches have room. With n
    the next batch to ship, B groups a batch and M batches in all, that is invariant F:

        for every e >= n:   #{unshipped groups with deadline <= e}  <=  (min(e, M - 1) - n + 1) * B

    the groups due by e fit into the batches that are left until e. Each transition keeps F:

        admit    only if F holds with one more group of deadline d; nothing is started that cannot be trained on
        ship     the B complete groups with the earliest deadlines, if F holds for the rest with n + 1 in place of n;
                 otherwise wait for a group with an earlier deadline, although enough others are complete
        drop     (error, filter) only takes a group away, which relaxes F: another may be admitted

        admitted --complete--> complete --ship--> trained on
            \\____drop____>  dropped, under a reason counted by the caller

    Example, k = 1, B = 2: a, b, c, d start at version 0 (d = 1). c and d finish first: batch 0 = {c, d}. Version 1 is
    published; e and f start (d = 2). Batch 1 must be {a, b}: it waits for them although e finished earlier.
    """

    def __init__(self, batch_groups: int, async_level: int, max_steps: int | None = None, next_step: int = 0) -> None:
        """Start before batch `next_step`.

        Args:
            batch_groups: groups in a batch, B >= 1.
            async_level: the bound k >= 0, in steps.
            max_steps: M, number of batches in all; None is endless.
            next_step: n, the first batch to ship.
        """
        self.batch_groups = batch_groups
        self.async_level = async_level
        self.max_steps = max_steps
        self.next_step = next_step
        self._entries: dict[int, _Entry] = {}

    @property
    def in_flight(self) -> int:
        """Groups that were admitted and are not complete."""
        return sum(not entry.complete for entry in self._entries.values())

    @property
    def finished(self) -> bool:
        """Every batch was shipped."""
        return self.max_steps is not None and self.next_step >= self.max_steps

    def can_admit(self, version: int) -> bool:
        """Tell whether a group that starts at policy version `version` (a step) is sure to find room in a batch."""
        deadlines = [entry.deadline for entry in self._entries.values()]
        return self._feasible([*deadlines, version + self.async_level], self.next_step)

    def admit(self, group_id: int, version: int) -> int:
        """Start group `group_id` at policy version `version`; returns its deadline.

        Raises:
            ValueError: F forbids it, or the group is known already.
        """
        if group_id in self._entries:
            raise ValueError(f"group {group_id} is admitted already")
        if not self.can_admit(version):
            raise ValueError(f"group {group_id} at version {version} would break the bound at batch {self.next_step}")
        deadline = version + self.async_level
        self._entries[group_id] = _Entry(deadline)
        return deadline

    def complete(self, group_id: int) -> None:
        """Record that all rollouts of the group are finished and scored."""
        self._entries[group_id].complete = True

    def drop(self, group_id: int) -> None:
        """Forget a group that will not be trained on."""
        del self._entries[group_id]

    def ready(self) -> list[int] | None:
        """Choose batch n: B group ids, earliest deadlines first, or None if it must wait."""
        if self.finished:
            return None
        order = sorted((e.deadline, group_id) for group_id, e in self._entries.items() if e.complete)
        if len(order) < self.batch_groups:
            return None
        chosen = {group_id for _, group_id in order[: self.batch_groups]}
        rest = [entry.deadline for group_id, entry in self._entries.items() if group_id not in chosen]
        return sorted(chosen) if self._feasible(rest, self.next_step + 1) else None

    def ship(self, group_ids: list[int]) -> None:
        """Record that batch n, as `ready` chose it, was shipped; n becomes n + 1."""
        for group_id in group_ids:
            del self._entries[group_id]
        self.next_step += 1

    def _feasible(self, deadlines: list[int], next_step: int) -> bool:
        """Test F for unshipped groups with these deadlines; it can only fail at a deadline, so only those are tried."""
        last = UNBOUNDED if self.max_steps is None else self.max_steps - 1
        due = sorted(deadlines)
        return all(
            index + 1 <= (min(deadline, last) - next_step + 1) * self.batch_groups for index, deadline in enumerate(due)
        )
