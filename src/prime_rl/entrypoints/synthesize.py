"""`synthesize`: generate training data with a served model in environments."""

from typing import TYPE_CHECKING

from prime_rl.core.entry_point import command

if TYPE_CHECKING:
    from prime_rl.configs.synthesize import SynthesizeConfig


@command
def main() -> None:
    """Run environments and write samples for `sft`."""
    from prime_rl.configs.synthesize import SynthesizeConfig

    config = SynthesizeConfig.load(check=_check)
    from prime_rl.core.logs import set_up_logging
    from prime_rl.evaluation.synthesis import plan, synthesize

    plan(config)
    set_up_logging(config.log.level, config.log.utc, config.run_paths.log("synthesize") if config.log.file else None)
    synthesize(config)


def _check(config: "SynthesizeConfig") -> None:
    from prime_rl.evaluation.synthesis import plan
    from prime_rl.supervisor.input_check import check_imports

    plan(config)
    check_imports(config.env, config.client.api_key_var)


if __name__ == "__main__":
    main()
