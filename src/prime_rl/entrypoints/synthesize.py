"""`synthesize`: generate training data with a served model in environments."""

from prime_rl.core.entry_point import command
from prime_rl.supervisor.input_check import check_dry_run


@command
def main() -> None:
    """Run environments and write samples for `sft`."""
    from prime_rl.configs.synthesize import SynthesizeConfig

    config = SynthesizeConfig.load(check=check_dry_run)
    from prime_rl.core.logs import set_up_logging
    from prime_rl.evaluation.synthesis import plan, synthesize

    plan(config)
    set_up_logging(config.log.level, config.log.utc, config.run_paths.log("synthesize") if config.log.file else None)
    synthesize(config)


if __name__ == "__main__":
    main()
