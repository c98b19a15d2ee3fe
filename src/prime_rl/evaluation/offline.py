"""The `eval` command: evaluates a served model in environments and benchmarks.

Each finished example is written to disk at once. The same command resumes an interrupted evaluation.
"""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import uvloop
from loguru import logger

from prime_rl.configs.eval import EvalConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation.eval_plan import EvalTask, check_installed, plan_tasks
from prime_rl.evaluation.eval_report import Summary, prefix_metrics, print_table, sample_rows, summarise
from prime_rl.evaluation.eval_results import SUMMARY, first_error, write_json
from prime_rl.evaluation.eval_session import EvalSession, clients, lease_servers, open_session
from prime_rl.monitors import Monitor
from prime_rl.rollouts.clients.inference_client import LoadedVersion
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.weights.weight_retention import hold_version

_MAX_SAMPLES = 256
"""Largest number of rollouts of an environment in the table of samples of W&B."""

Result = dict[str, Any]
"""A summary with the name of its environment, the version, and the folder of its rollouts."""


def evaluate(config: EvalConfig) -> list[Result]:
    """Evaluate in every environment of `config`, print a table, write files.

    Raises:
        ConfigError: no environment is named, one does not load, or the published weights do not exist.
        RunError: a server cannot be reached or refuses everything, or an environment has no finished example.
    """
    tasks, versions = check_input(config)
    paths = RunPaths(config.output_dir)

    async def run() -> list[Result]:
        async with open_session(config, tasks, "eval") as session:
            with closing(Monitor(paths, "eval", config.metric_loggers, config)) as monitor:
                if versions:
                    return await _evaluate_versions(session, config, versions, monitor)
                return await _evaluate_loaded(session, config, await session.loaded_policy(), monitor)

    results = uvloop.run(run())
    write_json(paths.evals_dir / SUMMARY, results)
    print_table(results)
    for result in results:
        logger.info("{}: rollouts, settings and summary are in {}", result["env"], result["folder"])
    if empty := next((result for result in results if not result["examples"]), None):
        raise RunError(f"all examples of {empty['env']} failed; the first: {empty['first_error']}")
    return results


def check_input(config: EvalConfig) -> tuple[list[EvalTask], list[Path]]:
    """Return the tasks and the folders of the versions, before anything is written; raises ConfigError."""
    check_installed(config.env)
    tasks = plan_tasks(
        config.env,
        config.benchmarks,
        config.sampling,
        config.num_examples,
        config.rollouts_per_example,
        benchmark_data=config.benchmark_data,
    )
    return tasks, _published_versions(config)


def _published_versions(config: EvalConfig) -> list[Path]:
    """Return the folders of the published versions to evaluate, in ascending order; [] without `weights_dir`."""
    if config.weights_dir is None:
        return []
    if config.client.api == "chat":
        raise ConfigError("weights_dir needs an `inference` server, which loads versions; remove client.api = chat")
    available = steps_in(config.weights_dir)
    wanted = available if config.steps is None else sorted(set(config.steps))
    if missing := set(wanted) - set(available):
        raise ConfigError(
            f"weights_dir: {config.weights_dir} does not hold step {min(missing)}; it holds "
            f"{', '.join(map(str, available)) or 'no step_N folder'}"
        )
    if not wanted:
        raise ConfigError(f"weights_dir: {config.weights_dir} holds no step_N folder")
    return [config.weights_dir / f"step_{step}" for step in wanted]


async def _evaluate_versions(
    session: EvalSession, config: EvalConfig, versions: list[Path], monitor: Monitor
) -> list[Result]:
    """Evaluate the base model and published versions in turn; the servers end with the base model.

    Meanwhile a run that still publishes into the same directory does not delete the versions.
    """
    if session.api == "chat":
        raise ConfigError(
            f"{config.client.urls[0]} does not answer GET /policy: it is not an `inference` server, and cannot load "
            "the versions of weights_dir"
        )
    results: list[Result] = []
    with ExitStack() as held:
        for directory in versions:
            held.enter_context(hold_version(directory))
        async with lease_servers(clients(config, f"eval of {config.output_dir.resolve()}")) as servers:
            if config.eval_base_model:
                results += await _evaluate_loaded(session, config, await servers.load_base(), monitor)
            for directory in versions:
                results += await _evaluate_loaded(session, config, await servers.load(directory), monitor)
    return results


async def _evaluate_loaded(
    session: EvalSession, config: EvalConfig, loaded: LoadedVersion | None, monitor: Monitor
) -> list[Result]:
    """Evaluate what the servers have loaded, in one environment after the other."""
    version = loaded.version.step if loaded is not None else None
    results: list[Result] = []
    metrics: Summary = {}
    samples: list[dict[str, Any]] = []
    distributions: dict[str, list[float]] = {}
    for task, pool in session.pools:
        folder, rows = await session.run_or_resume(task, pool, loaded, RunPaths(config.output_dir).evals_dir)
        summary = summarise(rows, config.pass_threshold, config.pass_at, config.majority_pattern)
        header = {"env": task.name, "identity": task.env.identity, "model": config.model.name, "version": version}
        write_json(folder / SUMMARY, header | summary)
        metrics |= prefix_metrics("eval", task.name, summary)
        samples += sample_rows(task.name, rows, _MAX_SAMPLES)
        rollouts = [rollout for row in rows for rollout in row.rollouts]
        distributions[f"{task.name}/reward"] = [rollout.reward for rollout in rollouts]
        distributions[f"{task.name}/completion_len"] = [rollout.tokens for rollout in rollouts]
        # Without weights_dir the table needs no column for the version.
        header["version"] = version if config.weights_dir is not None else None
        results.append(header | summary | {"folder": str(folder), "first_error": first_error(rows)})
    monitor.log(version or 0, metrics)
    monitor.log_samples(version or 0, samples)
    monitor.log_distributions(version or 0, distributions)
    return results
