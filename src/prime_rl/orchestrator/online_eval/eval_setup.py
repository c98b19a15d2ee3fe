"""Starts the environments of the online evaluations."""

from contextlib import AsyncExitStack
from functools import partial

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rollouts.eval_common import EvalEnvConfig
from prime_rl.configs.shared.blocks import server_root
from prime_rl.core.errors import ConfigError
from prime_rl.evaluation.eval_plan import EvalTask, plan_tasks
from prime_rl.orchestrator.inference.inference_server import FindProblem, accept_all
from prime_rl.orchestrator.online_eval.online_evaluation import EvalSchedule
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.workers.environment_pool import (
    EnvironmentPool,
    start_pools,
    warn_about_training_examples,
)
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.paths import RunPaths


async def start_schedules(
    config: OrchestratorConfig,
    host: WorkerLauncher,
    access: ModelAccess,
    paths: RunPaths,
    stack: AsyncExitStack,
    find_problem: FindProblem = accept_all,
) -> list[EvalSchedule]:
    """Start the environments of `config.eval` and `config.val`, all at once; `stack` closes them.

    `find_problem` says why a separate server for evaluations cannot be used.

    Raises ConfigError also if an environment of `config.val` has no evaluation split.
    """

    def pool(item: EvalTask, prefix: str) -> EnvironmentPool:
        return EnvironmentPool(
            item.env.as_env_config(), host, access, split="eval", workers=config.workers_per_env,
            log=lambda name: paths.log(f"{prefix}_{name}"),
        )  # fmt: skip

    schedule = partial(
        EvalSchedule, seq_len=config.seq_len, seed=config.seed, idle_timeout_s=config.wait_timeout_seconds
    )
    schedules = []
    if (block := config.eval) is not None:
        tasks = plan_tasks(
            block.env, block.benchmarks, block.sampling, block.num_examples, block.rollouts_per_example,
            block.rollouts_per_prompt, block.benchmark_data,
        )  # fmt: skip
        urls = None if block.base_url is None else [server_root(url) for url in block.base_url]
        run_id = f"evaluations of {config.run_id or config.output_dir.resolve()}"
        timeouts = access.request_timeout_s, config.client.probe_timeout_seconds

        def own_servers() -> list[InferenceClient]:
            return [InferenceClient(url, access.model, run_id, access.api_key, *timeouts) for url in urls or ()]

        schedules.append(
            schedule(
                prefix="eval",
                tasks=[(task, pool(task, "eval")) for task in tasks],
                interval=block.interval,
                base=block.eval_base_model,
                mode=block.mode,
                hold_s=block.hold_timeout_seconds,
                own_servers=own_servers if urls is not None else None,
                find_problem=find_problem,
                max_concurrent=block.max_concurrent,
                pass_threshold=block.pass_threshold,
            )
        )
    if (val := config.val) is not None:
        environments = [EvalEnvConfig.from_training(env) for env in config.env]
        tasks = plan_tasks(environments, [], config.sampling, val.num_examples, val.rollouts_per_example)
        started = [(task, pool(task, "val")) for task in tasks]
        schedules.append(
            schedule(prefix="val", tasks=started, interval=val.interval, base=True, max_concurrent=val.max_concurrent)
        )
    await start_pools([pool for item in schedules for _, pool in item.tasks], stack)
    for item in schedules:
        pools = [pool for _, pool in item.tasks]
        if item.prefix == "eval":
            warn_about_training_examples(pools)
        elif shared := next((pool for pool in pools if pool.eval_split != "own"), None):
            kind = "has no evaluation split" if shared.eval_split == "train" else "is a v1 taskset, which has no splits"
            raise ConfigError(
                f"val: environment {shared.name!r} {kind}, so it would be validated on its training examples; "
                "give it an evaluation split (env.args), or use eval with an environment of held-out examples"
            )
    return schedules
