"""`orchestrator`: sample rollouts, ship batches, switch inference."""

import os

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import run_main


def main() -> None:
    """Run the orchestrator."""
    run_main(_main)


def _main() -> None:
    if os.environ.get("PRIME_RL_SUPERVISED") == "1":  # whoever starts it by hand may close the shell
        from prime_rl.supervisor.process import follow_parent

        follow_parent()
    config = OrchestratorConfig.load()
    from prime_rl.logs import set_up_logging
    from prime_rl.monitor.bench import benchmark
    from prime_rl.orchestrator.setup import orchestrate

    set_up_logging(config.log)
    with benchmark(config.bench, config.run_paths, "orchestrator"):
        orchestrate(config)


if __name__ == "__main__":
    main()
