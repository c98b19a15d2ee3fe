"""From the orchestrator's configuration to its evaluations, their environments started."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from prime_rl.configs.online_eval import OnlineEvalConfig, ValConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.playing import PlayedEnvConfig
from prime_rl.orchestrator.engine import Engine
from prime_rl.orchestrator.evals.online import Schedule
from prime_rl.orchestrator.evals.player import Player
from prime_rl.orchestrator.evals.workloads import Play, plan
from prime_rl.orchestrator.workers.host import WorkerHost
from prime_rl.orchestrator.workers.pool import EnvironmentPool, ModelAccess
from prime_rl.run.paths import RunPaths


async def start_schedules(
    config: OrchestratorConfig, host: WorkerHost, access: ModelAccess, paths: RunPaths, stack: AsyncExitStack
) -> list[Schedule]:
    """Start the environments of `config.eval` and `config.val`; `stack` closes them.

    Raises:
        ConfigError: an environment cannot be loaded, or a benchmark is not installed.
        RunError: a worker died while it loaded.
    """

    async def started(plays: Sequence[Play], prefix: str) -> list[tuple[Play, Player]]:
        pools: list[tuple[Play, Player]] = []
        for item in plays:
            pool = EnvironmentPool(
                item.env.plain(), host, access, split="eval", log=lambda name: paths.log(f"{prefix}_{name}")
            )
            pools.append((item, await stack.enter_async_context(pool)))
        return pools

    schedules = []
    if config.eval is not None:
        schedules.append(_eval(config, config.eval, await started(_eval_plays(config.eval), "eval"), access))
    if config.val is not None:
        schedules.append(_val(config, config.val, await started(_val_plays(config, config.val), "val")))
    return schedules


def _eval_plays(block: OnlineEvalConfig) -> list[Play]:
    return plan(
        block.env, block.benchmarks, block.sampling, block.num_examples, block.rollouts_per_example,
        block.rollouts_per_prompt,
    )  # fmt: skip


def _val_plays(config: OrchestratorConfig, block: ValConfig) -> list[Play]:
    environments = [PlayedEnvConfig.model_validate(env.model_dump()) for env in config.env]
    return plan(environments, [], config.sampling, block.num_examples, block.rollouts_per_example)


def _eval(
    config: OrchestratorConfig, block: OnlineEvalConfig, plays: Sequence[tuple[Play, Player]], access: ModelAccess
) -> Schedule:
    def own_servers() -> list[Engine]:
        urls = [url.rstrip("/").removesuffix("/v1") for url in block.base_url or ()]
        run_id = f"evaluations of {config.run_id or config.output_dir.resolve()}"
        timeout_s, probe_s = access.request_timeout_s, config.client.probe_timeout
        return [Engine(url, access.model, run_id, access.api_key, timeout_s, probe_s) for url in urls]

    return Schedule(
        prefix="eval",
        plays=plays,
        interval=block.interval,
        base=block.eval_base_model,
        mode=block.mode,
        hold_s=block.hold_s,
        own_servers=own_servers if block.base_url is not None else None,
        max_concurrent=block.max_concurrent,
        pass_threshold=block.pass_threshold,
        seq_len=config.seq_len,
        seed=config.seed,
        patience_s=config.wait_timeout_seconds,
    )


def _val(config: OrchestratorConfig, block: ValConfig, plays: Sequence[tuple[Play, Player]]) -> Schedule:
    return Schedule(
        prefix="val",
        plays=plays,
        interval=block.interval,
        base=True,
        max_concurrent=block.max_concurrent,
        seq_len=config.seq_len,
        seed=config.seed,
        patience_s=config.wait_timeout_seconds,
    )
