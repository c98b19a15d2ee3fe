"""What `eval` and `synthesize` share: servers, started environments, and playing what is not yet on disk."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.playing import Api
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.orchestrator.engine import Engine, LoadedPolicy
from prime_rl.orchestrator.evals.player import Workload, play
from prime_rl.orchestrator.evals.report import progress_bar
from prime_rl.orchestrator.evals.results import open_results
from prime_rl.orchestrator.evals.rows import ExampleRow
from prime_rl.orchestrator.evals.servers import FixedServers, api_key, detect_api
from prime_rl.orchestrator.evals.workloads import Play, choose_examples, folder_name
from prime_rl.orchestrator.workers.host import WorkerHost
from prime_rl.orchestrator.workers.pool import EnvironmentPool, ModelAccess
from prime_rl.run.paths import RunPaths

Config = EvalConfig | SynthesizeConfig


@dataclass(frozen=True, slots=True)
class Session:
    """What all environments of one command share.

    Attributes:
        config: the command's.
        api: how the servers are asked.
        servers: they, by the addresses that workers use.
        pools: the environments, started, with how each is played.
        split: which examples.
    """

    config: Config
    api: Api
    servers: FixedServers
    pools: Sequence[tuple[Play, EnvironmentPool]]
    split: Literal["train", "eval"]


@asynccontextmanager
async def open_session(
    config: Config, plays: Sequence[Play], split: Literal["train", "eval"]
) -> AsyncIterator[Session]:
    """Find out how the servers are asked, and start the environments.

    Raises:
        ConfigError: an environment does not load.
        RunError: the server cannot be reached.
    """
    api = await detect_api(config.client)
    urls = config.client.urls
    addresses = [config.client.chat_url(index) for index in range(len(urls))] if api == "chat" else urls
    paths = RunPaths(config.output_dir)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(WorkerHost())
        access = _access(config, api)
        pools = []
        for item in plays:
            pool = EnvironmentPool(
                item.env.plain(), host, access, split=split, workers=config.workers_per_env, log=paths.log
            )
            pools.append((item, await stack.enter_async_context(pool)))
        yield Session(config, api, FixedServers(addresses), pools, split)


async def play_or_resume(
    session: Session, item: Play, pool: EnvironmentPool, loaded: LoadedPolicy | None, parent: Path
) -> tuple[Path, list[ExampleRow]]:
    """Play the chosen examples of one environment, those excepted that an earlier call has finished.

    Args:
        session: what the command shares.
        item: how the environment is played.
        pool: plays it.
        loaded: what the servers sample from, if they tell.
        parent: folder of the environment; the rows go to a folder in it that stands for all they depend on.

    Returns:
        That folder, and the rows of all chosen examples in their order.
    """
    config = session.config
    examples = choose_examples(len(pool), item.num_examples, config.seed)
    settings = _settings(session, item, len(pool), loaded)
    with open_results(parent / folder_name(item.name), settings) as results:
        finished = [results.rows[i] for i in examples if i in results.rows and results.rows[i].rollouts]
        done = {row.example for row in finished}
        left = [i for i in examples if i not in done]
        if finished and left:
            logger.info("{}: going on after {} of {} examples ({})", item.name, len(done), len(examples), results.path)
        work = Workload(
            pool, left, item.rollouts, item.parameters, item.sampling.seed, config.seq_len, config.max_concurrent
        )
        with progress_bar(item.name, finished, len(examples)) as bar:

            def keep(row: ExampleRow) -> None:
                results.add(row)
                bar.add(row)

            await play(work, session.servers, keep)
        rows = [results.rows[i] for i in examples]
    if error := first_error(rows):
        failed = sum(row.failure is not None for row in rows)
        logger.warning("{}: {} examples failed; the first: {}", item.name, failed, error)
    return results.path.parent, rows


async def look(config: Config) -> LoadedPolicy:
    """Ask what the first server samples from; it is not leased, so that it may be asked while a run uses it."""
    url, client = config.client.urls[0], config.client
    async with Engine(url, config.model.name, "", api_key(client), client.timeout, client.probe_timeout) as engine:
        loaded = await engine.look()
    logger.info("{} samples from version {} ({})", url, loaded.version, loaded.hash)
    return loaded


def first_error(rows: Sequence[ExampleRow]) -> str | None:
    """Return why the first failed example failed; None if none did."""
    return next((row.failure.message for row in rows if row.failure is not None), None)


def _access(config: Config, api: Api) -> ModelAccess:
    return ModelAccess(
        model=config.model.name,
        tokenizer=config.tokenizer.name or config.model.name,
        trust_remote_code=config.tokenizer.trust_remote_code,
        rendering=config.rendering,
        api_key=api_key(config.client),
        request_timeout_s=config.client.timeout,
        api=api,
        keep_messages=True,
    )


def _settings(session: Session, item: Play, available: int, loaded: LoadedPolicy | None) -> Mapping[str, Any]:
    """Return all that the rollouts of an example depend on. Which examples are taken is not among it."""
    config = session.config
    settings: dict[str, Any] = {
        "model": config.model.name,
        "api": session.api,
        "env": item.env.id,
        "args": item.env.args,
        "split": session.split,
        "timeout": item.env.timeout,
        "examples": available,
        "rollouts_per_example": item.rollouts,
        "sampling": item.sampling.model_dump(),
    }
    if loaded is None:
        return settings | {"servers": config.client.urls}
    return settings | {
        "version": str(loaded.version),
        "weights": loaded.hash,
        "seq_len": config.seq_len,
        "tokenizer": config.tokenizer.name or config.model.name,
        "rendering": config.rendering.model_dump(mode="json"),
    }
