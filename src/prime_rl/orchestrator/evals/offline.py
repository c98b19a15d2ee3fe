"""`eval`: a served model in environments and benchmarks; trains nothing, ships nothing.

What was played is never played again: each finished example is on disk at once, under a name that stands for the model
and everything else its rollouts depend on.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from loguru import logger

from prime_rl.configs.eval import EvalConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.engine import Engine, LoadedPolicy
from prime_rl.orchestrator.evals.report import named, print_table
from prime_rl.orchestrator.evals.results import SUMMARY, write_json
from prime_rl.orchestrator.evals.scores import Summary, summarise
from prime_rl.orchestrator.evals.servers import LeasedServers, api_key
from prime_rl.orchestrator.evals.sessions import Session, first_error, look, open_session, play_or_resume
from prime_rl.orchestrator.evals.workloads import Play, plan
from prime_rl.run.cleaning import hold
from prime_rl.run.paths import RunPaths, steps_in

Result = dict[str, Any]
"""A summary with the name of its environment, the version, and the folder that holds its rollouts."""


def evaluate(config: EvalConfig) -> list[Result]:
    """Evaluate in every environment of `config`, print a table, write files; goes on where an earlier call stopped.

    Raises:
        ConfigError: no environment is named, one does not load, or the published weights are not there.
        RunError: a server cannot be reached or refuses everything, or nothing could be played to its end.
    """
    plays = plan(config.env, config.benchmarks, config.sampling, config.num_examples, config.rollouts_per_example)
    published = _published(config)
    paths = RunPaths(config.output_dir)
    monitor = Monitor(paths, "eval", config.wandb, config)
    try:
        results = uvloop.run(_evaluate(config, plays, published, monitor))
    finally:
        monitor.close()
    write_json(paths.evals_dir / SUMMARY, results)
    print_table(results)
    for result in results:
        logger.info("{}: rollouts, settings and summary are in {}", result["env"], result["folder"])
    if empty := next((result for result in results if not result["examples"]), None):
        raise RunError(f"no example of {empty['env']} could be played to its end; the first: {empty['first_error']}")
    return results


def _published(config: EvalConfig) -> list[Path]:
    """Return the folders of the published versions to evaluate, ascending; [] without `weights_dir`."""
    if config.weights_dir is None:
        if config.steps is not None:
            raise ConfigError("steps says which versions of weights_dir to evaluate; set --weights-dir too")
        return []
    if config.client.api == "chat":
        raise ConfigError("client.api = chat cannot be switched between versions; weights_dir needs our own server")
    there = steps_in(config.weights_dir)
    wanted = there if config.steps is None else sorted(set(config.steps))
    if missing := set(wanted) - set(there):
        raise ConfigError(
            f"weights_dir: {config.weights_dir} does not hold step {min(missing)}; it holds "
            f"{', '.join(map(str, there)) or 'no step_N folder'}"
        )
    if not wanted:
        raise ConfigError(f"weights_dir: {config.weights_dir} holds no step_N folder")
    return [config.weights_dir / f"step_{step}" for step in wanted]


async def _evaluate(
    config: EvalConfig, plays: Sequence[Play], published: Sequence[Path], monitor: Monitor
) -> list[Result]:
    async with open_session(config, plays, "eval") as session:
        if not published:
            loaded = await look(config) if session.api == "generate" else None
            return await _evaluate_one(session, config, loaded, monitor)
        if session.api == "chat":
            raise ConfigError(
                f"{config.client.urls[0]} does not answer GET /policy: it is no server of ours, and cannot be switched "
                "between the versions of weights_dir"
            )
        return await _evaluate_versions(session, config, published, monitor)


async def _evaluate_versions(
    session: Session, config: EvalConfig, published: Sequence[Path], monitor: Monitor
) -> list[Result]:
    """Evaluate the base model and published versions, one after the other; then the base model is served again.

    Until then a run that still publishes into the same directory does not delete them.
    """
    name, key, timeout_s = config.model.name, api_key(config.client), config.client.timeout
    run_id = f"eval of {config.output_dir.resolve()}"
    results: list[Result] = []
    engines = [Engine(url, name, run_id, key, timeout_s, config.client.probe_timeout) for url in config.client.urls]
    async with AsyncExitStack() as stack:
        for directory in published:
            stack.enter_context(hold(directory))
        leased = await stack.enter_async_context(LeasedServers(engines))
        if config.eval_base:
            results += await _evaluate_one(session, config, await leased.load_base(), monitor, of_several=True)
        for directory in published:
            results += await _evaluate_one(session, config, await leased.load(directory), monitor, of_several=True)
    return results


async def _evaluate_one(
    session: Session, config: EvalConfig, loaded: LoadedPolicy | None, monitor: Monitor, of_several: bool = False
) -> list[Result]:
    """Evaluate what the servers have loaded, in one environment after the other."""
    version = loaded.version.step if loaded is not None else None
    parent = RunPaths(config.output_dir).evals_dir
    results: list[Result] = []
    metrics: Summary = {}
    for item, pool in session.pools:
        folder, rows = await play_or_resume(session, item, pool, loaded, parent)
        summary = summarise(rows, config.pass_threshold)
        about = {"env": item.name, "model": config.model.name, "version": version}
        write_json(folder / SUMMARY, about | summary)
        metrics |= named("eval", item.name, summary)
        shown = about | {"version": version if of_several else None}
        results.append(shown | summary | {"folder": str(folder), "first_error": first_error(rows)})
    monitor.log(version or 0, metrics)
    return results
