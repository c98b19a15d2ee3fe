"""`synthesize`: generate training data with a served model in environments."""

from prime_rl.core.entry_point import command


@command
def main() -> None:
    """Run environments and write samples for `sft`."""
    from prime_rl.configs.synthesize import SynthesizeConfig

    config = SynthesizeConfig.load()
    from prime_rl.core.logs import set_up_logging
    from prime_rl.evaluation.synthesis import plan, synthesize

    plan(config)
    set_up_logging(config.log.level, config.log.utc, config.run_paths.log("synthesize") if config.log.file else None)
    synthesize(config)


if __name__ == "__main__":
    main()
