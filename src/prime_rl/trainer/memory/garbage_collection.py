"""Python's garbage collection at the same steps on all ranks.

With automatic collection each rank collects at its own time, and all others wait for it in the next collective. Objects
of the setup are frozen, so that one collection takes milliseconds.
"""

import gc


class GarbageCollection:
    """Collects every `interval` steps, and at no other time. Created after the setup."""

    def __init__(self, interval: int) -> None:
        """Collect the garbage of the setup and disable automatic collection."""
        self._interval = interval
        gc.collect()
        gc.freeze()
        gc.disable()

    def step_done(self, step: int) -> None:
        """Collect at multiples of the interval, which are the same steps on every rank, also after a restart."""
        if (step + 1) % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Enable automatic collection again."""
        gc.unfreeze()
        gc.enable()
