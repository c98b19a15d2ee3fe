"""Runs on a node before the run starts: does it see the run directory of `rl`?

python -m prime_rl.supervisor.nodes.node_probe FILE
"""

import sys
import time
from pathlib import Path

REACHED = "prime_rl.node reached"
"""The line that this program prints if all is well."""
NOT_SHARED = 3
"""Exit code if the file does not appear."""
_LAG_SECONDS = 5.0
"""How long a network file system may hide a new file."""
_RECHECK_SECONDS = 0.25


def main() -> None:
    """Wait until the file exists, which `rl` has created."""
    file, deadline = Path(sys.argv[1]), time.monotonic() + _LAG_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            print(f"{file.parent} {'is another one' if file.parent.is_dir() else 'does not exist'} there")
            sys.exit(NOT_SHARED)
        time.sleep(_RECHECK_SECONDS)
    print(REACHED)


if __name__ == "__main__":
    main()
