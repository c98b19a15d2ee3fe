"""`eval`: evaluate a served model in environments."""

import sys
from pathlib import Path

from prime_rl.core.entry_point import command
from prime_rl.core.errors import ConfigError
from prime_rl.supervisor.input_check import check_dry_run


@command
def main() -> None:
    """Evaluate and print a table of rewards; with `--compare A B`, compare two results."""
    if "--compare" in sys.argv:
        _compare(sys.argv[1:])
        return
    from prime_rl.configs.eval import EvalConfig

    config = EvalConfig.load(check=check_dry_run)
    from prime_rl.core.logs import set_up_logging
    from prime_rl.evaluation.offline import check_input, evaluate

    check_input(config)
    set_up_logging(config.log.level, config.log.utc, config.run_paths.log("eval") if config.log.file else None)
    evaluate(config)


def _compare(argv: list[str]) -> None:
    if len(argv) != 3 or argv[0] != "--compare":
        raise ConfigError("usage: eval --compare A B, with two results such as outputs/evals/gsm8k/3f2a9c1b77de")
    from prime_rl.evaluation.eval_report import compare, print_comparisons

    print_comparisons(compare(Path(argv[1]), Path(argv[2])))


if __name__ == "__main__":
    main()
