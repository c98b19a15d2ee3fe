"""From a configuration to a running orchestrator."""

import asyncio
import gc
import signal
import socket
import sys
from contextlib import AsyncExitStack
from typing import Any

import uvloop
from loguru import logger

from prime_rl.api_key import read_api_key
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import RunError
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.beginning import Beginning, Rewound, find_beginning, find_rewind, waits_for_trainer
from prime_rl.orchestrator.concurrency import ConcurrencyController
from prime_rl.orchestrator.dispatch import TrainEnvironment
from prime_rl.orchestrator.engine import Engine
from prime_rl.orchestrator.evals.start import start_schedules
from prime_rl.orchestrator.model_config import read_model_config, vocabulary_size
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.orchestrator.row_cost import row_cost
from prime_rl.orchestrator.server import Server
from prime_rl.orchestrator.tasks import end_tasks
from prime_rl.orchestrator.vigil import SUPERVISOR, watch_supervisor
from prime_rl.orchestrator.workers.host import WorkerHost
from prime_rl.orchestrator.workers.pool import EnvironmentPool, ModelAccess
from prime_rl.run.heart import Heartbeat
from prime_rl.run.paths import RunPaths
from prime_rl.run.peers import Peers
from prime_rl.run.wait import DeadlineError
from prime_rl.supervisor.process import is_supervised


def orchestrate(config: OrchestratorConfig) -> None:
    """Run the orchestrator to its end; where the trainer goes back meanwhile, begin again from there.

    Raises:
        ConfigError: bad input: tokenizer, environment, prompts.
        RunError: the run cannot go on.
    """
    with Heartbeat(config.run_paths, "orchestrator", "orchestrator") as heart:
        _orchestrate(config, heart)


def _orchestrate(config: OrchestratorConfig, heart: Heartbeat) -> None:
    trainer = Peers(config.run_paths, "trainer", config.heartbeat.limits, judges=not is_supervised())
    while True:
        heart.enter("find where to begin", waiting_for="trainer" if waits_for_trainer(config) else None)
        try:
            beginning = find_beginning(config, trainer.check)
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {trainer.told()}") from None
        try:
            uvloop.run(_run(config, config.run_paths, beginning, heart))
            return
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)
        except Rewound as rewound:
            logger.warning("{}", rewound)
        except RunError as error:  # perhaps because the trainer has put aside what was being read
            if find_rewind(config, beginning.branch) is None:
                raise
            logger.warning("{}; meanwhile the trainer has gone back", error)
        config = config.model_copy(update={"restart": True})


async def _run(config: OrchestratorConfig, paths: RunPaths, beginning: Beginning, heart: Heartbeat) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _current_task().cancel)
    async with AsyncExitStack() as stack:
        heart.enter("start the environments")
        heart.follow(asyncio.get_running_loop())
        stack.callback(heart.follow, None)
        if is_supervised():
            supervisor = Peers(paths, SUPERVISOR, config.heartbeat.limits, judges=False)
            stack.push_async_callback(end_tasks, asyncio.create_task(watch_supervisor(supervisor)))
        host = await stack.enter_async_context(WorkerHost())
        description = await asyncio.to_thread(read_model_config, config.model.name)
        access = model_access(config, vocabulary_size(description))
        environments = await start_environments(config, host, access, paths, stack)
        schedules = await start_schedules(config, host, access, paths, stack)
        servers = [await connect(config, url, stack) for url in config.client.urls]
        monitor = Monitor(paths, "orchestrator", config.wandb, config)
        stack.callback(monitor.close)
        gc.unfreeze()  # what an earlier branch has left
        gc.collect()
        gc.freeze()  # what is there now stays: no collection has to look at it again
        await Orchestrator(
            config, environments, servers, monitor, row_cost(description), schedules, beginning, heart
        ).run()


async def start_environments(
    config: OrchestratorConfig, host: WorkerHost, access: ModelAccess, paths: RunPaths, stack: AsyncExitStack
) -> list[TrainEnvironment]:
    """Start the workers of every environment of `config`; `stack` closes them.

    Raises:
        ConfigError: an environment cannot be loaded, or has a prompt that is too long.
    """
    pools = [
        EnvironmentPool(env, host, access, workers=config.workers_per_env, check_seq_len=config.seq_len, log=paths.log)
        for env in config.env
    ]
    for pool in pools:
        stack.push_async_callback(pool.close)
    await asyncio.gather(*(pool.start() for pool in pools))
    return [TrainEnvironment.of(pool, config, index) for index, pool in enumerate(pools)]


def model_access(config: OrchestratorConfig, vocabulary: int | None = None) -> ModelAccess:
    """Return how the environment workers of `config` reach the model, which knows so many tokens if that is known."""
    return ModelAccess(
        model=config.model.name,
        tokenizer=config.tokenizer.name or config.model.name,
        trust_remote_code=config.tokenizer.trust_remote_code,
        rendering=config.rendering,
        trajectory_strategy=config.trajectory_strategy,
        api_key=read_api_key(config.client.api_key_var),
        request_timeout_s=config.client.timeout,
        vocabulary=vocabulary,
    )


async def connect(config: OrchestratorConfig, url: str, stack: AsyncExitStack) -> Server:
    """Open the admin connection to one inference server; `stack` closes it."""
    run_id = config.run_id or f"{socket.gethostname()}:{config.output_dir.resolve()}"
    api_key = read_api_key(config.client.api_key_var)
    client = config.client
    engine = await stack.enter_async_context(
        Engine(url, config.model.name, run_id, api_key, client.timeout, client.probe_timeout)
    )
    return Server(engine, ConcurrencyController(config.concurrency, config.seq_len))


def _current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    return task
