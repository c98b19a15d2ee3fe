"""Starts the orchestrator from its configuration, and restarts it after a trainer rollback."""

import asyncio
import gc
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import uvloop
from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.api_key import read_api_key, withheld_from_environments
from prime_rl.core.daemon_futures import run_in_daemon_thread
from prime_rl.core.errors import RunError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.asyncio_utils import end_tasks
from prime_rl.orchestrator.batching.row_flops import read_model_config, row_cost, vocabulary_size
from prime_rl.orchestrator.health.progress_watchdog import SUPERVISOR, watch_supervisor
from prime_rl.orchestrator.inference.concurrency_control import ConcurrencyController
from prime_rl.orchestrator.inference.inference_server import FindProblem, InferenceServer, accept_all
from prime_rl.orchestrator.inference.server_settings import RequiredSettings
from prime_rl.orchestrator.online_eval.eval_setup import start_pools, start_schedules
from prime_rl.orchestrator.orchestrator import OrchestratorLoop
from prime_rl.orchestrator.resume import (
    StartPoint,
    TrainerRolledBack,
    find_rollback,
    find_start_point,
    waits_for_trainer,
)
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.environments.environment_identity import identify_all
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import DeadlineError

_THREADS = 32


def orchestrate(config: OrchestratorConfig) -> None:
    """Run the orchestrator; after a trainer rollback, start again from the checkpoint. Raises ConfigError, RunError."""
    config = identify_all(config, "", logger.warning)
    paths, settings = config.run_paths, config.run_settings
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=settings) as heartbeat:
        trainer = PeerMonitor(paths, "trainer", config.heartbeat.limits, raises=not is_supervised(), settings=settings)
        while True:
            heartbeat.enter("find the start point", waiting_for="trainer" if waits_for_trainer(config) else None)
            try:
                start_point = find_start_point(config, trainer.check)
            except DeadlineError as error:
                raise DeadlineError(f"{error}; {trainer.describe()}") from None
            try:
                uvloop.run(_run(config, start_point, heartbeat))
                return
            except asyncio.CancelledError:
                sys.exit(128 + signal.SIGTERM)
            except (TrainerRolledBack, RunError) as error:
                # A rollback may have archived the files that were being read.
                if isinstance(error, RunError) and find_rollback(config, start_point.branch) is None:
                    raise
                logger.warning("{}; starting again after the rollback", error)
            config = config.model_copy(update={"restart": True})


async def _run(config: OrchestratorConfig, start_point: StartPoint, heartbeat: HeartbeatWriter) -> None:
    paths = config.run_paths
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # The default, one per CPU, could all wait for a directory that does not answer.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="worker"))
    async with AsyncExitStack() as stack:
        heartbeat.enter("start the environments")
        heartbeat.watch_event_loop(asyncio.get_running_loop())
        stack.callback(heartbeat.watch_event_loop, None)
        if is_supervised():
            supervisor = PeerMonitor(paths, SUPERVISOR, config.heartbeat.limits, raises=False)
            stack.push_async_callback(end_tasks, asyncio.create_task(watch_supervisor(supervisor)))
        withheld = withheld_from_environments([config.client.api_key_var], config.model_dump())
        host = await stack.enter_async_context(WorkerLauncher(withheld))
        description = await asyncio.to_thread(read_model_config, config.model.name)
        access = model_access(config, vocabulary_size(description))
        environments = await start_environments(config, host, access, paths, stack)
        required = RequiredSettings(config.model.name, config.seq_len, paths, config.heartbeat.limits)
        schedules = await start_schedules(config, host, access, paths, stack, required.find_problem)
        if not config.bench:  # no trainer takes part in a benchmark
            await run_in_daemon_thread(required.read_trainer)
            stack.push_async_callback(end_tasks, asyncio.create_task(required.follow_trainer()))
        servers = [await connect(config, url, stack, required.find_problem) for url in config.client.urls]
        monitor = Monitor(paths, "orchestrator", config.metric_loggers, config)
        stack.callback(monitor.close)
        gc.unfreeze()  # objects of an earlier branch
        gc.collect()
        gc.freeze()  # the remaining objects live until the end: later collections skip them
        await OrchestratorLoop(
            config, environments, servers, monitor, row_cost(description), schedules, start_point, heartbeat
        ).run()


async def start_environments(
    config: OrchestratorConfig, host: WorkerLauncher, access: ModelAccess, paths: RunPaths, stack: AsyncExitStack
) -> list[EnvironmentPool]:
    """Start the workers of every environment of `config`; `stack` closes them.

    Raises ConfigError if an environment cannot be loaded, or has a prompt longer than `seq_len`.
    """
    pools = [
        EnvironmentPool(
            env, host, access, workers=config.workers_per_env, check_seq_len=config.seq_len, log=paths.log,
            timeline=TimelineWriter(paths, f"env_{env.label.replace('/', '_')}"),
        )
        for env in config.env
    ]  # fmt: skip
    await start_pools(pools, stack)
    return pools


def model_access(config: OrchestratorConfig, vocabulary: int | None = None) -> ModelAccess:
    """Return how environment workers reach the model; `vocabulary` is its number of tokens, if known."""
    return ModelAccess(
        model=config.model.name,
        tokenizer=config.tokenizer.name or config.model.name,
        trust_remote_code=config.tokenizer.trust_remote_code,
        rendering=config.rendering,
        sandbox=config.sandbox,
        trajectory_strategy=config.trajectory_strategy,
        api_key=read_api_key(config.client.api_key_var),
        request_timeout_s=config.client.timeout_seconds,
        vocabulary=vocabulary,
    )


async def connect(
    config: OrchestratorConfig, url: str, stack: AsyncExitStack, find_problem: FindProblem = accept_all
) -> InferenceServer:
    """Open the admin connection to one inference server; `stack` closes it."""
    run_id = config.run_id or f"{socket.gethostname()}:{config.output_dir.resolve()}"
    options = config.client
    client = InferenceClient(
        url, config.model.name, run_id, read_api_key(options.api_key_var), options.timeout_seconds,
        options.probe_timeout_seconds,
    )  # fmt: skip
    await stack.enter_async_context(client)
    return InferenceServer(client, ConcurrencyController(config.concurrency, config.seq_len), find_problem)
