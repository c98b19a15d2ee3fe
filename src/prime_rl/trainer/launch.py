"""`torchrun`, which also leaves word of the rank that died, and how (I7); its arguments are torchrun's.

Whoever is killed says nothing, and what is heard of the ranks that lost it is that they lost another. The kernel kills
where memory runs out: it counts that, so that it can be told.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from prime_rl.errors import record_cause
from prime_rl.run.surroundings import how_it_died, oom_kills
from prime_rl.supervisor.process import LAUNCHER
from prime_rl.trainer.loopback import stay_on_this_machine


def main() -> None:
    """Run torchrun; exit code 1 where a rank has failed."""
    kills = oom_kills()
    os.environ[LAUNCHER] = str(os.getpid())  # the ranks die with this process
    if "--standalone" in sys.argv:
        sys.argv[1:1] = stay_on_this_machine()
    try:
        torchrun()
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        if (cause := cause_of(error, kills)) is not None:
            print(f"error: {cause}", file=sys.stderr, flush=True)
            record_cause(cause, 1)
        sys.exit(1)


def cause_of(error: ChildFailedError, kills: int) -> str | None:
    """Name the rank that a signal has killed; None if each ended by itself, and left its own word.

    Args:
        error: of torchrun: the ranks that had failed when it looked, and those that it ended then; it kills what does
            not end by itself, but a second later at the earliest.
        kills: what `oom_kills` said at the start.
    """
    begun = error.get_first_failure()[1].timestamp
    at_first = {rank: failure for rank, failure in error.failures.items() if failure.timestamp == begun}
    killed = {rank: -failure.exitcode for rank, failure in at_first.items() if failure.exitcode < 0}
    killed = {rank: number for rank, number in killed.items() if number != signal.SIGTERM}
    if not killed:
        return None
    # A rank that has lost another may abort itself: it is to blame only if nobody else is.
    rank, number = min(killed.items(), key=lambda one: (one[1] == signal.SIGABRT, one[0]))
    return f"rank {rank} (pid {error.failures[rank].pid}) {how_it_died(number, kills)}"


if __name__ == "__main__":
    main()
