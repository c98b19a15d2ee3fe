"""Runs on a node before the run starts: does it see the run directory of `rl`, and are its ports free?

    python -m prime_rl.supervisor.nodes.node_probe FILE [PORT FLAG]...

FLAG is the option that sets the port.
"""

import sys
import time
from pathlib import Path

from prime_rl.core.errors import ConfigError
from prime_rl.core.ports import check_port

REACHED = "prime_rl.node reached"
"""The line that this program prints if all is well, followed by the number of GPUs."""
NOT_SHARED = 3
"""Exit code if the file does not appear."""
PORT_IN_USE = 4
_LAG_SECONDS = 5.0
"""How long a network file system may hide a new file."""
_RECHECK_SECONDS = 0.25


def main() -> None:
    """Wait until the file exists, which `rl` has created, and check the ports."""
    file, deadline = Path(sys.argv[1]), time.monotonic() + _LAG_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            print(f"{file.parent} {'is another one' if file.parent.is_dir() else 'does not exist'} there")
            sys.exit(NOT_SHARED)
        time.sleep(_RECHECK_SECONDS)
    for port, flag in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        try:
            check_port("0.0.0.0", int(port), flag)
        except ConfigError as error:
            print(error)
            sys.exit(PORT_IN_USE)
    print(REACHED, num_gpus())


def num_gpus() -> int:
    """The number of GPUs of this machine. The variable CUDA_VISIBLE_DEVICES here is that of the host of `rl`."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


if __name__ == "__main__":
    main()
