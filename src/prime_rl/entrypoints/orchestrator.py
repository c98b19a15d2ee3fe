"""`orchestrator`: sample rollouts, ship batches, switch inference."""

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import run_main


def main() -> None:
    """Run the orchestrator."""
    run_main(_main)


def _main() -> None:
    config = OrchestratorConfig.load()
    from prime_rl.logs import set_up_logging
    from prime_rl.orchestrator.setup import orchestrate
    from prime_rl.supervisor.process import follow_parent

    follow_parent()
    set_up_logging(config.log)
    orchestrate(config)


if __name__ == "__main__":
    main()
