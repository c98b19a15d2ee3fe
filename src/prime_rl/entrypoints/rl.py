"""`uv run rl`: a whole run."""

import sys
from typing import TYPE_CHECKING

from prime_rl.core.entry_point import command
from prime_rl.core.errors import ConfigError

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig


@command
def main() -> None:
    """Start and supervise inference (if configured), the orchestrator and the trainer; or submit them to Slurm.

    `rl init NAME` writes a project instead.
    """
    if sys.argv[1:2] == ["init"]:
        from prime_rl.entrypoints.init.project import main as init_project

        init_project(sys.argv[2:])
        return
    from prime_rl.configs.loading.sources import read_environment
    from prime_rl.configs.rl import RLConfig

    if len(sys.argv) == 1 and not any(given.path != ("output_dir",) for given in read_environment(RLConfig)):
        raise ConfigError(
            "nothing to run; usage: uv run rl @ FILE.toml [--key value ...], for example "
            "`uv run rl @ configs/reverse_text/cpu.toml`; `uv run rl --help` lists the keys, and `uv run rl init NAME` "
            "writes a project"
        )
    if {"--dry-run", "--help", "-h", "--help-all"} & {*sys.argv}:
        RLConfig.load(check=_check)
    from prime_rl.supervisor.input_check import InputCheck

    with InputCheck() as check:
        config = RLConfig.load()
        if config.slurm is not None:
            from prime_rl.supervisor.slurm_launch import submit_to_slurm

            print(submit_to_slurm(config))
            return
        from prime_rl.supervisor.launch import run

        sys.exit(run(config, check))


def _check(config: "RLConfig") -> None:
    """Raise ConfigError for an environment that cannot be imported; a job of Slurm imports it on its own node.

    Says on stderr what works with models of this family.
    """
    from prime_rl.core.import_utils import packages_unlike_the_lock
    from prime_rl.rollouts.environment_id import check_environments
    from prime_rl.supervisor.input_check import check_imports
    from prime_rl.supervisor.planning.model_shape import describe_family

    if (text := packages_unlike_the_lock()) is not None:
        print(f"warning: {text}", file=sys.stderr)
    for run in config.orchestrators.values() if config.slurm is None else ():
        check_environments(run, "orchestrator.")
        check_imports([*run.env, *(run.eval.env if run.eval is not None else ())], run.client.api_key_var)
    if (family := describe_family(config.model.name, config.model.revision)) is not None:
        print(f"model {family}", file=sys.stderr)


if __name__ == "__main__":
    main()
