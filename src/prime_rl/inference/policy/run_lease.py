"""The lease of the run that may switch the policy: held by run_id and renewed by every call of its holder."""

import time
from collections.abc import Callable


class LeaseHeldError(Exception):
    """Another run holds the server; the message names the run."""

    def __init__(self, message: str, free_in_s: float) -> None:
        super().__init__(message)
        self.free_in_s = free_in_s  # seconds until the lease expires, unless its holder calls again


class Lease:
    """The right to switch the policy.

    The first call with a run_id takes the lease. It expires `seconds` after the last call of its holder, which may also
    release it. Calls without a run_id are admitted while no run holds it.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._holder: str | None = None
        self._since = 0.0
        self._renewed = 0.0

    @property
    def holder(self) -> str | None:
        """The run that holds the lease now, or None."""
        if self._holder is not None and self._clock() - self._renewed > self.seconds:
            self._holder = None
        return self._holder

    def take(self, run_id: str | None) -> None:
        """Take or renew the lease for `run_id`; raises LeaseHeldError if another run holds it.

        None only checks that no run holds it.
        """
        now = self._clock()
        if self.holder is not None and self.holder != run_id:
            raise LeaseHeldError(
                f"run {self.holder} has held this server for {now - self._since:.0f} s "
                f"(last call {now - self._renewed:.0f} s ago); the lease expires {self.seconds:.0f} s after that",
                free_in_s=self.seconds - (now - self._renewed),
            )
        if run_id is not None:
            self._since = self._since if self.holder == run_id else now
            self._holder, self._renewed = run_id, now

    def renew(self, run_id: str | None) -> None:
        """Renew the lease if `run_id` holds it; otherwise do nothing."""
        if run_id is not None and self.holder == run_id:
            self._renewed = self._clock()

    def release(self, run_id: str) -> None:
        """Release the lease, if `run_id` holds it; raises LeaseHeldError if another run does."""
        if self.holder is not None:
            self.take(run_id)
            self._holder = None
