"""`orchestrator`: sample rollouts, ship batches, update the weights of the inference servers."""

from contextlib import nullcontext

from prime_rl.core.entry_point import command
from prime_rl.liveness.parent_process import die_with_parent, is_supervised
from prime_rl.supervisor.input_check import check_dry_run


@command
def main() -> None:
    """Run the orchestrator; a standalone one outlives its shell."""
    if is_supervised():
        die_with_parent()
    from prime_rl.configs.orchestrator import OrchestratorConfig

    config = OrchestratorConfig.load(check=check_dry_run)
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


if __name__ == "__main__":
    main()
