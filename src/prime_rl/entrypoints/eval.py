"""`eval`: evaluate a served model in environments."""

from prime_rl.core.entry_point import command
from prime_rl.loading.saved_help import print_saved_help


@command
def main() -> None:
    """Evaluate and print a table of rewards."""
    print_saved_help("eval")
    from prime_rl.configs.eval import EvalConfig

    config = EvalConfig.load()
    from prime_rl.core.logging import set_up_logging
    from prime_rl.evaluation.offline import evaluate

    set_up_logging(config.log.level, config.log.utc)
    evaluate(config)


if __name__ == "__main__":
    main()
