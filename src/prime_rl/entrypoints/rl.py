"""`uv run rl`: a whole run on one node."""

import sys

from prime_rl.configs import RLConfig
from prime_rl.errors import run_main
from prime_rl.supervisor.run import run


def main() -> None:
    """Start inference (if configured), the orchestrator and the trainer, and see them to their end."""
    run_main(lambda: sys.exit(run(RLConfig.load())))


if __name__ == "__main__":
    main()
