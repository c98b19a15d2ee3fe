"""`orchestrator`: sample rollouts, ship batches, update the weights of the inference servers."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from prime_rl.core.entry_point import command
from prime_rl.liveness.parent_process import die_with_parent, is_supervised

if TYPE_CHECKING:
    from prime_rl.configs.orchestrator import OrchestratorConfig


@command
def main() -> None:
    """Run the orchestrator; a standalone one outlives its shell."""
    if is_supervised():
        die_with_parent()
    from prime_rl.configs.orchestrator import OrchestratorConfig

    config = OrchestratorConfig.load(check=_check_environments)
    from prime_rl.core.logs import rotating_logs, set_up_logging
    from prime_rl.monitors.bench_report import report_benchmark
    from prime_rl.orchestrator.orchestrator_setup import orchestrate
    from prime_rl.rollouts.environment_id import check_environments
    from prime_rl.storage.file_locks import hold_role_lock

    if not is_supervised():
        check_environments(config, "")  # before it writes files
    set_up_logging(config.log.level, config.log.utc, config.run_paths.log("orchestrator") if config.log.file else None)
    hold_role_lock(config.run_paths, "orchestrator")
    rotation = nullcontext() if is_supervised() else rotating_logs(config.run_paths.logs_dir)  # of environments
    with rotation, report_benchmark(config.bench, config.run_paths, "orchestrator"):
        orchestrate(config)


def _check_environments(config: "OrchestratorConfig") -> None:
    from prime_rl.rollouts.environment_id import check_environments
    from prime_rl.supervisor.input_check import check_imports

    check_environments(config, "")
    check_imports([*config.env, *(config.eval.env if config.eval is not None else ())], config.client.api_key_var)


if __name__ == "__main__":
    main()
