"""`uv run eval`: evaluate a served model."""

from prime_rl.configs import EvalConfig
from prime_rl.errors import RunError, run_main


def main() -> None:
    """Read the configuration. Evaluation itself is later work, and says so."""
    run_main(_main)


def _main() -> None:
    EvalConfig.load()
    raise RunError(
        "evaluation is not there yet: `uv run eval` so far only checks its configuration (--help, --dry-run)"
    )


if __name__ == "__main__":
    main()
