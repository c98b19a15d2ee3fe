"""One run at a time steers the server: a lease, held by run_id and renewed by every call of its holder."""

import time
from collections.abc import Callable


class LeaseHeldError(Exception):
    """Another run holds the server; the message says which and since when.

    Attributes:
        free_in_s: seconds until the server is free, unless its holder calls again.
    """

    def __init__(self, message: str, free_in_s: float) -> None:
        """Take the message and the seconds."""
        super().__init__(message)
        self.free_in_s = free_in_s


class Lease:
    """Who may switch the policy.

    The lease is free at start, is taken by the first call that brings a run_id, and becomes free again when its
    holder gives it back or has not called for `seconds`. Calls without a run_id are let through while it is free.
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
        """Take or renew the lease for `run_id`; None only asks whether it is free.

        Raises:
            LeaseHeldError: another run holds it.
        """
        now = self._clock()
        if self.holder is not None and self.holder != run_id:
            raise LeaseHeldError(
                f"run {self.holder} holds this server since {now - self._since:.0f} s "
                f"(last call {now - self._renewed:.0f} s ago); it is free {self.seconds:.0f} s after its last call",
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
        """Give the lease back; nothing happens if it is free.

        Raises:
            LeaseHeldError: another run holds it.
        """
        if self.holder is not None:
            self.take(run_id)
            self._holder = None
