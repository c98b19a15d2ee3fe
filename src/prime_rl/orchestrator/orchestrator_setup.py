"""Starts the orchestrator and its environments from the configuration, and restarts it after a trainer rollback."""

import asyncio
import gc
import signal
import socket
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial

import uvloop
from loguru import logger

from prime_rl.configs.client import server_root
from prime_rl.configs.environment import EnvConfig, EvalEnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig, slot_name
from prime_rl.core.api_key import read_api_key, withheld_from_environments
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import EvalSplit, Split
from prime_rl.evaluation.eval_plan import EvalTask, plan_tasks
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.liveness.run_settings import MAX_RUNS
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.algorithms.advantages import advantage_function
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.example_stream import make_order
from prime_rl.orchestrator.inference.inference_server import (
    ConcurrencyController,
    FindProblem,
    InferenceServer,
    RequiredSettings,
    accept_all,
)
from prime_rl.orchestrator.online_evaluation import EvalSchedule
from prime_rl.orchestrator.orchestrator import OrchestratorLoop
from prime_rl.orchestrator.packing import read_model_config, row_cost, vocabulary_size
from prime_rl.orchestrator.resume import (
    StartPoint,
    TrainerRolledBack,
    announce,
    find_rollback,
    find_start_point,
    waits_for_trainer,
)
from prime_rl.orchestrator.run_reports import RunWarnings
from prime_rl.orchestrator.waits import (
    SUPERVISOR,
    end_tasks,
    raise_if_excluded,
    unless_excluded,
    watch_supervisor,
)
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.environment_id import identify_all
from prime_rl.rollouts.separate.interpreters import write_lock
from prime_rl.rollouts.workers.environment_pool import (
    EnvironmentPool,
    start_pools,
    warn_about_training_examples,
)
from prime_rl.rollouts.workers.protocol import LoadEnvironment, ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.model_files import find_tokenizer
from prime_rl.storage.paths import RUN_FOLDER, RunPaths
from prime_rl.storage.wait_for import DeadlineError, run_in_daemon_thread, wait_until

_THREADS = 32


def orchestrate(config: OrchestratorConfig) -> None:
    """Run the orchestrator; after a trainer rollback, start again from the checkpoint. Raises ConfigError, RunError."""
    config = identify_all(config, "", logger.warning, logger.info)
    paths, settings = config.run_paths, config.run_settings
    announce(config)
    for env in (*config.env, *(config.eval.env if config.eval is not None else ())):
        write_lock(env, paths.locks_dir)
    with HeartbeatWriter(paths, "orchestrator", "orchestrator", settings=settings) as heartbeat:
        heartbeat.enter_imports("packages")
        trainer = PeerMonitor(paths, "trainer", config.heartbeat.limits, raises=not is_supervised(), settings=settings)

        def check() -> bool:
            raise_if_excluded(paths)
            return trainer.check()

        while True:
            heartbeat.enter("find the start point", waiting_for="trainer" if waits_for_trainer(config) else None)
            try:
                start_point = find_start_point(config, check)
            except DeadlineError as error:
                raise DeadlineError(f"{error}; {trainer.describe()}") from None
            try:
                uvloop.run(unless_excluded(_run(config, start_point, heartbeat), paths))
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
    heartbeat.enter("wait for the start of the trainer", config.wait_timeout_seconds, waiting_for="trainer")
    config = await run_in_daemon_thread(partial(name_slot, config))
    async with AsyncExitStack() as stack:
        heartbeat.enter(f"start the environments {', '.join({env.label: None for env in config.env})}")
        heartbeat.watch_event_loop(asyncio.get_running_loop())
        stack.callback(heartbeat.watch_event_loop, None)
        if is_supervised():
            supervisor = PeerMonitor(paths, SUPERVISOR, config.heartbeat.limits, raises=False)
            stack.push_async_callback(end_tasks, asyncio.create_task(watch_supervisor(supervisor)))
        withheld = withheld_from_environments([config.client.api_key_var], config.model_dump())
        host = await stack.enter_async_context(WorkerLauncher(withheld))
        description = await asyncio.to_thread(read_model_config, config.model)
        access = await asyncio.to_thread(model_access, config, vocabulary_size(description))
        warnings = RunWarnings(paths.warnings)
        stack.push_async_callback(warnings.close)
        environments = await start_environments(config, host, access, stack, warnings)
        required = RequiredSettings(config.model.name, config.seq_len, paths, config.heartbeat.limits)
        schedules = await start_schedules(config, host, access, stack, required.find_problem, warnings)
        if not config.bench:  # no trainer takes part in a benchmark
            await run_in_daemon_thread(required.read_trainer)
            stack.push_async_callback(end_tasks, asyncio.create_task(required.follow_trainer()))
        servers = [await connect(config, url, stack, required.find_problem) for url in config.client.urls]
        # A service that does not answer would stop the heartbeat.
        monitor = await run_in_daemon_thread(Monitor, paths, "orchestrator", config.metric_loggers, config)
        stack.callback(monitor.close)
        gc.unfreeze()  # objects of an earlier branch
        gc.collect()
        gc.freeze()  # the remaining objects live until the end: later collections skip them
        await OrchestratorLoop(
            config, environments, servers, monitor, row_cost(description), schedules, start_point, heartbeat, warnings
        ).run()


def name_slot(config: OrchestratorConfig) -> OrchestratorConfig:
    """Name the slot after the run's folder, unless it has a name, if the trainer publishes adapters.

    A trainer of several runs does; its folder is above theirs. Waits for the trainer if the folder has the name of one
    of several runs and `rl` has not decided: the processes may start in any order. Another trainer is known if it has
    started. Raises DeadlineError if no trainer starts in time.
    """
    paths, lora = config.run_paths, config.model.lora
    if lora.name is not None or config.bench:
        return config
    trainer = RequiredSettings(config.model.name, config.seq_len, paths, config.heartbeat.limits)
    is_one_of_several = False

    def is_known() -> bool:
        nonlocal is_one_of_several
        trainer.read_trainer()
        if RUN_FOLDER.fullmatch(paths.root.name):
            with suppress(OSError, ValueError):  # there is none, or it is not of a trainer
                above = tomllib.loads(RunPaths(paths.root.parent).config("trainer").read_text())
                is_one_of_several = above.get(MAX_RUNS, 1) > 1
        return is_one_of_several or trainer.knows_trainer

    if (
        not is_known()
        and RUN_FOLDER.fullmatch(paths.root.name)
        and not is_supervised()
        and config.wait_for_final_version
    ):
        what = f"a trainer in {paths.root.parent} or {paths.root} to start"
        logger.info("waiting for {}; the environments are loaded after that", what)
        wait_until(paths.heartbeats_dir, is_known, config.wait_timeout_seconds, what)
    if not (is_one_of_several or trainer.publishes_adapters):
        return config
    named = lora.model_copy(update={"name": slot_name(paths.root)})
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": named})})


async def start_environments(
    config: OrchestratorConfig,
    host: WorkerLauncher,
    access: ModelAccess,
    stack: AsyncExitStack,
    warnings: RunWarnings | None = None,
) -> list[EnvironmentPool]:
    """Start the workers of every environment of `config`; `stack` closes them. `warnings` get theirs.

    Raises ConfigError if an environment cannot be loaded, or has a prompt longer than `seq_len` that is not skipped.
    """
    paths = config.run_paths
    warnings = warnings or RunWarnings(paths.warnings)
    pools = [
        EnvironmentPool(
            env, host, access, workers=config.workers_per_env, check_seq_len=config.seq_len, log=paths.log,
            timeline=TimelineWriter(paths, f"env_{env.label.replace('/', '_')}"), warn=warnings.add,
        )
        for env in config.env
    ]  # fmt: skip
    await start_pools(pools, stack)
    return pools


def check_functions(config: OrchestratorConfig) -> None:
    """Raise ConfigError if a function for advantages or a curriculum cannot be imported or called."""
    advantage_function(config.advantage)
    if config.buffer.type == "curriculum":
        Curriculum(0, config.buffer, (), "")


def load_input(config: OrchestratorConfig) -> int:
    """Load what `orchestrate` will load in its environment workers, and return the number of training examples.

    Raises:
        ConfigError: as `orchestrate`, for an environment, its data, the tokenizer, or a function of the user.
    """
    # Not into the process that runs the loop.
    from prime_rl.rollouts.agent_function import check_gateway
    from prime_rl.rollouts.workers.worker_main import LoadedEnvironment, load_backend

    advantage_function(config.advantage)
    access = model_access(config)

    def load(env: EnvConfig, split: Split, seq_len: int | None = None) -> LoadedEnvironment:
        check_gateway(env)
        return load_backend(LoadEnvironment(env, split, access, seq_len), lambda warning: None)

    for task in eval_tasks(config):
        load(task.env.as_env_config(), "eval")
    for task in val_tasks(config):
        check_validates(task.name, load(task.env.as_env_config(), "eval").backend.eval_split)
    trained = [load(env, "train", config.seq_len) for env in config.env]
    counts = [len(loaded.backend) - len(loaded.skipped) for loaded in trained]
    for env, count in zip(config.env, counts, strict=True):
        order = make_order(count, config.buffer, (0,), env.label)
        if isinstance(order, Curriculum):
            order.weights()
    return sum(counts)


def model_access(config: OrchestratorConfig, vocabulary: int | None = None) -> ModelAccess:
    """Return how environment workers reach the model; `vocabulary` is its number of tokens, if known."""
    model = config.model
    return ModelAccess(
        model=model.lora.name or model.name,
        tokenizer=str(
            find_tokenizer(config.tokenizer.name, model.name, model.revision, model.download_timeout_seconds)
        ),
        trust_remote_code=config.tokenizer.trust_remote_code,
        rendering=config.rendering,
        sandbox=config.sandbox,
        trajectory_strategy=config.trajectory_strategy,
        api_key=read_api_key(config.client.api_key_var),
        request_timeout_seconds=config.client.timeout_seconds,
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
        options.probe_timeout_seconds, slot=config.model.lora.name,
    )  # fmt: skip
    await stack.enter_async_context(client)
    return InferenceServer(client, ConcurrencyController(config.concurrency, config.seq_len), find_problem)


async def start_schedules(
    config: OrchestratorConfig,
    host: WorkerLauncher,
    access: ModelAccess,
    stack: AsyncExitStack,
    find_problem: FindProblem = accept_all,
    warnings: RunWarnings | None = None,
) -> list[EvalSchedule]:
    """Start the environments of `config.eval` and `config.val`, all at once; `stack` closes them.

    `find_problem` says why a separate server for evaluations cannot be used; `warnings` get those of the environments.

    Raises ConfigError also if an environment of `config.val` has no evaluation split.
    """

    paths = config.run_paths
    warn = (warnings or RunWarnings(paths.warnings)).add

    def pool(item: EvalTask, prefix: str) -> EnvironmentPool:
        return EnvironmentPool(
            item.env.as_env_config(), host, access, split="eval", workers=config.workers_per_env,
            log=lambda name: paths.log(f"{prefix}_{name}"), warn=warn,
        )  # fmt: skip

    schedule = partial(
        EvalSchedule, seq_len=config.seq_len, seed=config.seed, idle_timeout_seconds=config.wait_timeout_seconds
    )
    schedules = []
    if (block := config.eval) is not None:
        tasks = eval_tasks(config)
        urls = None if block.base_url is None else [server_root(url) for url in block.base_url]
        run_id = f"evaluations of {config.run_id or config.output_dir.resolve()}"
        timeouts = access.request_timeout_seconds, config.client.probe_timeout_seconds

        slot = config.model.lora.name

        def own_servers() -> list[InferenceClient]:
            place = access.model, run_id, access.api_key
            return [InferenceClient(url, *place, *timeouts, slot=slot) for url in urls or ()]

        schedules.append(
            schedule(
                prefix="eval",
                tasks=[(task, pool(task, "eval")) for task in tasks],
                interval=block.interval,
                base=block.eval_base_model,
                mode=block.mode,
                hold_seconds=block.hold_timeout_seconds,
                own_servers=own_servers if urls is not None else None,
                find_problem=find_problem,
                max_concurrent=block.max_concurrent,
                pass_threshold=block.pass_threshold,
            )
        )
    if (val := config.val) is not None:
        started = [(task, pool(task, "val")) for task in val_tasks(config)]
        schedules.append(
            schedule(prefix="val", tasks=started, interval=val.interval, base=True, max_concurrent=val.max_concurrent)
        )
    await start_pools([pool for item in schedules for _, pool in item.tasks], stack)
    for item in schedules:
        pools = [pool for _, pool in item.tasks]
        if item.prefix == "eval":
            warn_about_training_examples(pools)
        else:
            for each in pools:
                check_validates(each.name, each.eval_split)
    return schedules


def eval_tasks(config: OrchestratorConfig) -> list[EvalTask]:
    """Return the environments of `config.eval`, with how each is sampled."""
    if (block := config.eval) is None:
        return []
    return plan_tasks(
        block.env, block.benchmarks, block.sampling, block.num_examples, block.rollouts_per_example,
        block.rollouts_per_prompt, block.benchmark_data,
    )  # fmt: skip


def val_tasks(config: OrchestratorConfig) -> list[EvalTask]:
    """Return the environments of the training with the sampling of `config.val`."""
    if (val := config.val) is None:
        return []
    environments = [EvalEnvConfig.from_training(env) for env in config.env]
    return plan_tasks(environments, [], config.sampling, val.num_examples, val.rollouts_per_example)


def check_validates(name: str, eval_split: EvalSplit) -> None:
    """Raise ConfigError for an environment of `config.val` without evaluation examples of its own."""
    if eval_split == "own":
        return
    kind = "has no evaluation split" if eval_split == "train" else "is a v1 taskset, which has no splits"
    raise ConfigError(
        f"val: environment {name!r} {kind}, so it would be validated on its training examples; "
        "give it an evaluation split (env.args), or use eval with an environment of held-out examples"
    )
