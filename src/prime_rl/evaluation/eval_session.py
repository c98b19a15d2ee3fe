"""Opens the servers and environments of `eval` and `synthesize`, and runs the examples that are not on disk yet."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from loguru import logger

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.rollouts.eval_common import Api
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.core.api_key import read_api_key, withheld_from_environments
from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.evaluation.eval_plan import EvalTask, choose_examples
from prime_rl.evaluation.eval_report import progress_bar
from prime_rl.evaluation.eval_results import ExampleRow, first_error, open_results
from prime_rl.evaluation.runner import run_examples
from prime_rl.liveness.run_settings import SERVED_LENGTH
from prime_rl.rollouts.clients.inference_client import (
    InferenceClient,
    InferenceError,
    InferenceServerLost,
    LoadedPolicy,
)
from prime_rl.rollouts.environments.environment_identity import identify_environments
from prime_rl.rollouts.workers.environment_pool import (
    EnvironmentPool,
    start_pools,
    warn_about_training_examples,
)
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.paths import RunPaths

_RECONNECT_SECONDS = 60.0
"""How long lost servers are retried."""
_EXCLUDED_SECONDS = 10.0
"""How long a lost server gets no rollouts while others are available."""
_PROBE_SECONDS = 0.5
_RENEWAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class EvalSession:
    """What all environments of one command share: the servers and their protocol, tasks and started environments."""

    config: EvalConfig | SynthesizeConfig
    api: Api
    servers: "FixedServers"
    pools: Sequence[tuple[EvalTask, EnvironmentPool]]
    split: Literal["train", "eval"]

    async def loaded_policy(self) -> LoadedPolicy | None:
        """Return what the first server samples from; None for a server of another kind.

        The server is not leased, so this works while a run uses it.
        """
        if self.api == "chat":
            return None
        async with clients(self.config, "")[0] as client:
            loaded = await client.peek_policy()
        logger.info("{} samples from version {} ({})", client.url, loaded.version, loaded.hash)
        return loaded

    async def run_or_resume(
        self, task: EvalTask, pool: EnvironmentPool, loaded: LoadedPolicy | None, parent: Path
    ) -> tuple[Path, list[ExampleRow]]:
        """Run the chosen examples of one environment, except those that an earlier call has finished.

        Returns:
            The folder of the results, which is below `parent`, and the rows of all chosen examples in order.
        """
        config = self.config
        examples = choose_examples(len(pool), task.num_examples, config.seed)
        with open_results(parent / task.name.replace("/", "_"), self._settings(task, len(pool), loaded)) as results:
            finished = [results.rows[i] for i in examples if i in results.rows and results.rows[i].rollouts]
            done = {row.example for row in finished}
            remaining = [i for i in examples if i not in done]
            if finished and remaining:
                logger.info(
                    "{}: resuming after {} of {} examples ({})", task.name, len(done), len(examples), results.path
                )
            with progress_bar(task.name, finished, len(examples)) as show:

                def on_row(row: ExampleRow) -> None:
                    results.add(row)
                    show(row)

                await run_examples(task, pool, remaining, config.seq_len, config.max_concurrent, self.servers, on_row)
            rows = [results.rows[i] for i in examples]
        if pool.columns:  # those on disk may be of another breakdown
            rows = [msgspec.structs.replace(row, columns=pool.columns[row.example]) for row in rows]
        if error := first_error(rows):
            failed = sum(row.failure is not None for row in rows)
            logger.warning("{}: {} examples failed; the first: {}", task.name, failed, error)
        return results.path.parent, rows

    def _settings(self, task: EvalTask, available: int, loaded: LoadedPolicy | None) -> Mapping[str, Any]:
        """Return everything that the rollouts of an example depend on; the choice of examples is not part of it."""
        config = self.config
        settings: dict[str, Any] = {
            "model": config.model.name,
            "api": self.api,
            "env": task.env.id,
            "identity": task.env.identity,
            "rewards": [reward.model_dump() for reward in task.env.rewards],
            "args": task.env.args,
            "split": self.split,
            "timeout": task.env.timeout_seconds,
            "examples": available,
            "rollouts_per_example": task.rollouts,
            "sampling": task.sampling.model_dump(),
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


@asynccontextmanager
async def open_session(
    config: EvalConfig | SynthesizeConfig, tasks: Sequence[EvalTask], split: Literal["train", "eval"]
) -> AsyncIterator[EvalSession]:
    """Detect the protocol of the servers and start the environments. Raises ConfigError, RunError."""
    identified = identify_environments([task.env for task in tasks], "env", logger.warning)
    tasks = [replace(task, env=env) for task, env in zip(tasks, identified, strict=True)]
    api = await _detect_api(config)
    if api == "generate":
        await _compare_lengths(config)
    urls = config.client.urls
    addresses = [config.client.chat_url(index) for index in range(len(urls))] if api == "chat" else urls
    paths = RunPaths(config.output_dir)
    access = ModelAccess(
        model=config.model.name,
        tokenizer=config.tokenizer.name or config.model.name,
        trust_remote_code=config.tokenizer.trust_remote_code,
        rendering=config.rendering,
        sandbox=config.sandbox,
        api_key=read_api_key(config.client.api_key_var),
        request_timeout_s=config.client.timeout_seconds,
        api=api,
        keep_messages=True,
    )
    async with AsyncExitStack() as stack:
        # Environments may use the key of a provider, for example for a judge. They never get the key of our servers.
        own_keys = [config.client.api_key_var] if api == "generate" else []
        withheld = withheld_from_environments(own_keys, config.model_dump())
        launcher = await stack.enter_async_context(WorkerLauncher(withheld))
        pools = [
            EnvironmentPool(
                task.env.as_env_config(), launcher, access, split=split, workers=config.workers_per_env, log=paths.log
            )
            for task in tasks
        ]
        await start_pools(pools, stack)
        if split == "eval":
            warn_about_training_examples(pools)
        yield EvalSession(config, api, FixedServers(addresses), list(zip(tasks, pools, strict=True)), split)


async def _detect_api(config: EvalConfig | SynthesizeConfig) -> Api:
    """Return the configured protocol; `auto` depends on whether the first server answers GET /policy."""
    if config.client.api != "auto":
        return config.client.api
    api: Api = "chat"
    async with clients(config, "")[0] as client:
        with suppress(InferenceError):  # not one of our servers
            await client.peek_policy()
            api = "generate"
    route = "/inference/v1/generate" if api == "generate" else "/v1/chat/completions"
    logger.info("requests go to {} of {}", route, client.url)
    return api


async def _compare_lengths(config: EvalConfig | SynthesizeConfig) -> None:
    """Warn about servers whose context is shorter than `seq_len`: they end completions there."""
    for client in clients(config, ""):
        async with client:
            with suppress(InferenceError):  # a lost server is reported when it is used
                limit = (await client.peek_policy()).settings.get(SERVED_LENGTH)
                if isinstance(limit, int) and limit < config.seq_len:
                    logger.warning(
                        "{} truncates rollouts at {} tokens, before seq_len = {}; raise {} there, or lower seq_len",
                        client.url, limit, config.seq_len, SERVED_LENGTH,
                    )  # fmt: skip


def clients(config: EvalConfig | SynthesizeConfig, run_id: str) -> list[InferenceClient]:
    """Return clients of our own servers; those that load weights need a `run_id` for the lease."""
    server, model = config.client, config.model.name
    options = read_api_key(server.api_key_var), server.timeout_seconds, server.probe_timeout_seconds
    return [InferenceClient(url, model, run_id, *options) for url in server.urls]


class FixedServers:
    """Servers by address; the least loaded one is used. A lost server is excluded for a while, unless all are lost."""

    def __init__(
        self, urls: Sequence[str], reconnect_s: float = _RECONNECT_SECONDS, excluded_s: float = _EXCLUDED_SECONDS
    ) -> None:
        self._load = dict.fromkeys(urls, 0)
        self._lost: dict[str, float] = {}
        self._reconnect_s = reconnect_s
        self._excluded_s = excluded_s

    @asynccontextmanager
    async def acquire(self, rollouts: int) -> AsyncIterator[str]:
        """Reserve the least loaded server; see `runner.Servers`."""
        now = time.monotonic()
        able = [url for url in self._load if url not in self._lost or now - self._lost[url] >= self._excluded_s]
        url = min(able or [await self._wait_for_any()], key=self._load.__getitem__)
        self._load[url] += rollouts
        try:
            yield url
        except InferenceServerLost as error:
            if url not in self._lost:
                logger.warning("{}", error)
            self._lost[url] = time.monotonic()
            raise
        else:
            self._lost.pop(url, None)
        finally:
            self._load[url] -= rollouts

    async def _wait_for_any(self) -> str:
        deadline = time.monotonic() + self._reconnect_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline:
                for url in self._load:
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(url):
                            self._lost.pop(url, None)
                            return url
                await asyncio.sleep(_PROBE_SECONDS)
        raise RunError(f"no server responds ({', '.join(self._load)}); run the same command again to resume")


@dataclass(frozen=True, slots=True)
class LeasedServers:
    """Our own servers, leased to load one version after the other."""

    clients: Sequence[InferenceClient]

    async def load_base(self) -> LoadedPolicy:
        """Lease the servers and switch to the base model, version 0."""
        return (await asyncio.gather(*(client.reset() for client in self.clients)))[0]

    async def load(self, directory: Path) -> LoadedPolicy:
        """Switch to the published weights in `directory`; raise RunError if a server cannot, or loads other weights."""
        manifest = await asyncio.to_thread(read_manifest, directory, WEIGHTS_FORMAT)
        version = PolicyVersion(manifest["branch"], manifest["step"])
        absolute = str(await asyncio.to_thread(directory.resolve))
        loaded = await asyncio.gather(*(client.load(absolute, version) for client in self.clients))
        for client, answer in zip(self.clients, loaded, strict=True):
            if answer.hash != manifest["hash"]:
                raise RunError(f"{client.url} loaded {answer.version} ({answer.hash}) instead of {directory}")
        return loaded[0]


@asynccontextmanager
async def lease_servers(clients: Sequence[InferenceClient]) -> AsyncIterator[LeasedServers]:
    """Lease the servers of `clients`, which are not open yet; they serve the base model before and after the block.

    Raises:
        InferenceServerLost, InferenceError: a server cannot be reached, or another run holds it.
    """

    async def renew() -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            for client in clients:
                with suppress(InferenceServerLost, InferenceError):  # the rollouts detect a lost server
                    await client.policy()

    async def release(client: InferenceClient) -> None:
        with suppress(InferenceServerLost, InferenceError):  # a lost server cannot be released
            await client.reset()
            await client.release()

    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
            stack.push_async_callback(release, client)
        servers = LeasedServers(clients)
        await servers.load_base()
        renewal = asyncio.create_task(renew())
        stack.callback(renewal.cancel)
        yield servers
