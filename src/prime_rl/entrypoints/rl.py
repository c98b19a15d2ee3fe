"""`uv run rl`: a whole run."""

import sys

from prime_rl.core.entry_point import command
from prime_rl.loading.saved_help import print_saved_help


@command
def main() -> None:
    """Start and supervise inference (if configured), the orchestrator and the trainer; or submit them to Slurm."""
    print_saved_help("rl")
    from prime_rl.configs.rl import RLConfig

    config = RLConfig.load()
    if config.slurm is not None:
        from prime_rl.supervisor.slurm_launch import submit_to_slurm

        print(submit_to_slurm(config))
        return
    from prime_rl.supervisor.launch import run  # not needed by `--help`

    sys.exit(run(config))


if __name__ == "__main__":
    main()
