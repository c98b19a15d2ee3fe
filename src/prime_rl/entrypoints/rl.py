"""`uv run rl`: a whole run."""

import sys

from prime_rl.core.entry_point import command
from prime_rl.core.errors import ConfigError
from prime_rl.supervisor.input_check import InputCheck, check_dry_run


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
        RLConfig.load(check=check_dry_run)
    with InputCheck() as check:
        config = RLConfig.load()
        if config.slurm is not None:
            from prime_rl.supervisor.slurm_launch import submit_to_slurm

            print(submit_to_slurm(config))
            return
        from prime_rl.supervisor.launch import run

        sys.exit(run(config, check))


if __name__ == "__main__":
    main()
