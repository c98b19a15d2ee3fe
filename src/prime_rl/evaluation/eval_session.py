"""Opens the servers and environments of `eval` and `synthesize`, and runs the examples that are not on disk yet.

Of each environment, a bounded number of rollouts is in flight. Every example ends in exactly one row, with its rollouts
or with a failure. An exception ends the whole evaluation: no server is left, a server refuses everything, or the
workers do not start.
"""

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from loguru import logger

from prime_rl.configs.client import Api
from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.monitoring import METRIC_LOGGERS
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.core.api_key import read_api_key, withheld_from_environments
from prime_rl.core.errors import ConfigError, RunError, first_exception
from prime_rl.core.http_requests import open_client, request, send_request
from prime_rl.core.import_utils import packages_unlike_the_lock
from prime_rl.core.types import PolicyVersion
from prime_rl.evaluation.eval_plan import EvalTask, choose_examples
from prime_rl.evaluation.eval_report import progress_bar
from prime_rl.evaluation.eval_results import (
    EvalFailureKind,
    ExampleFailure,
    ExampleRow,
    RolloutRow,
    first_error,
    open_results,
)
from prime_rl.liveness.run_settings import SERVED_LENGTH
from prime_rl.rollouts.clients.inference_client import (
    InferenceClient,
    InferenceError,
    InferenceServerLost,
    LoadedVersion,
    sampling_parameters,
)
from prime_rl.rollouts.environment_id import identify_environments
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.separate.interpreters import write_lock
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool, start_pools, warn_about_training_examples
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.model_files import find_tokenizer
from prime_rl.storage.paths import RunPaths

_UNRELATED = {
    *("env", "benchmarks", "benchmark_data", "sampling", "rollouts_per_example", "split"),  # resolved per task
    *("num_examples", "seed", "weights_dir", "steps", "eval_base_model"),  # choose examples and versions
    *("pass_threshold", "pass_at", "majority_pattern", "min_reward", "keep_truncated"),  # applied to the rollouts
    *("client", "max_concurrent", "workers_per_env", "output_dir", "exp_id", "log", *METRIC_LOGGERS),
    *("from_runs", "max_per_example"),
}
"""Keys of `eval` and `synthesize` that no rollout depends on by itself. Any other key is part of the digest."""
_OF_PROMPTS = {"tokenizer", "rendering", "seq_len"}
"""Keys without effect on servers that render the prompts themselves."""
_UNRELATED_OF_ENV = {
    *("id", "name", "install", "breakdown", "num_examples", "rollouts_per_example", "sampling"),
    *("weight", "max_concurrent", "max_rollouts_per_minute", "min_rollouts", "long_prompts"),  # of training
    # Failed examples run again anyway.
    *("num_retries", "start_timeout_seconds", "silence_timeout_seconds", "cleanup_seconds"),
    "max_memory_gib",
    *("package", "requirements", "python", "interpreter"),  # `identity` names the packages
    *("type", "url", "harness"),  # resolved into `args` and `command`
}
_UNRELATED_OF_SANDBOX = {"num_jails", "max_running"}

_RECONNECT_SECONDS = 60.0
"""How long lost servers are retried."""
_EXCLUDED_SECONDS = 10.0
"""How long a lost server gets no rollouts while others are available."""
_PROBE_SECONDS = 0.5
_RENEWAL_SECONDS = 2.0
_MAX_REFUSALS = 8
"""After so many refused examples without a finished one, the server is at fault and not the examples."""
_FAILURE_KINDS: dict[type[Exception], EvalFailureKind] = {
    EnvironmentFailed: "environment",
    SampleTooLong: "overlong",
    InferenceError: "refused",
}


@dataclass(frozen=True, slots=True)
class EvalSession:
    """What all environments of one command share: the servers and their protocol, tasks and started environments."""

    config: EvalConfig | SynthesizeConfig
    api: Api
    servers: "FixedServers"
    pools: Sequence[tuple[EvalTask, EnvironmentPool]]
    split: Literal["train", "eval"]

    async def loaded_policy(self) -> LoadedVersion | None:
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
        self, task: EvalTask, pool: EnvironmentPool, loaded: LoadedVersion | None, parent: Path
    ) -> tuple[Path, list[ExampleRow]]:
        """Run the chosen examples of one environment, except those that an earlier call has finished.

        Returns:
            The folder of the results, which is below `parent`, and the rows of all chosen examples in order.
        """
        config = self.config
        examples = choose_examples(len(pool), task.num_examples, config.seed)
        with open_results(parent / task.name.replace("/", "_"), self._settings(task, pool, loaded)) as results:
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

    def _settings(self, task: EvalTask, pool: EnvironmentPool, loaded: LoadedVersion | None) -> Mapping[str, Any]:
        """Return everything that the rollouts of an example depend on; the choice of examples is not part of it."""
        config, template = self.config, self.config.rendering.chat_template
        settings = config.model_dump(mode="json", exclude=_UNRELATED | (_OF_PROMPTS if loaded is None else set()))
        settings["sandbox"] = config.sandbox.model_dump(mode="json", exclude=_UNRELATED_OF_SANDBOX)
        settings |= task.env.model_dump(mode="json", exclude=_UNRELATED_OF_ENV)
        settings |= {
            "api": self.api,
            "env": task.env.id,
            "command": task.env.program,
            "split": self.split,
            "examples": len(pool),
            "content": pool.content_hash,
            "rollouts_per_example": task.rollouts,
            "sampling": task.sampling.model_dump(mode="json"),
        }
        if loaded is None:
            return settings | {"servers": config.client.urls}
        settings |= {"version": str(loaded.version), "weights": loaded.hash}
        settings["tokenizer"]["name"] = config.tokenizer.name or config.model.name
        settings["rendering"]["chat_template"] = template.read_text() if template is not None else None
        return settings


@asynccontextmanager
async def open_session(
    config: EvalConfig | SynthesizeConfig, tasks: Sequence[EvalTask], split: Literal["train", "eval"]
) -> AsyncIterator[EvalSession]:
    """Detect the protocol of the servers and start the environments. Raises ConfigError, RunError."""
    if (text := packages_unlike_the_lock()) is not None:
        logger.warning(text)
    identified = identify_environments([task.env for task in tasks], "env", logger.warning, logger.info)
    for env in identified:
        write_lock(env, RunPaths(config.output_dir).locks_dir)
    tasks = [replace(task, env=env) for task, env in zip(tasks, identified, strict=True)]
    api = await _detect_api(config)
    await asyncio.to_thread(_check_default_model, config)
    if api == "generate":
        await _compare_lengths(config)
    urls = config.client.urls
    addresses = [config.client.chat_url(index) for index in range(len(urls))] if api == "chat" else urls
    paths, tokenizer = RunPaths(config.output_dir), ""
    if api == "generate":
        model = config.model
        found = asyncio.to_thread(
            find_tokenizer, config.tokenizer.name, model.name, model.revision, model.download_timeout_seconds
        )
        tokenizer = str(await found)
    access = ModelAccess(
        model=config.model.name,
        tokenizer=tokenizer,
        trust_remote_code=config.tokenizer.trust_remote_code,
        rendering=config.rendering,
        sandbox=config.sandbox,
        api_key=read_api_key(config.client.api_key_var),
        request_timeout_seconds=config.client.timeout_seconds,
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


def _check_default_model(config: EvalConfig | SynthesizeConfig) -> None:
    """Raise ConfigError if no model is named, and the first server lists others than the default. Blocks."""
    server, model = config.client, config.model
    if "name" in model.model_fields_set:
        return
    url, key = f"{server.chat_url(0)}/models", read_api_key(server.api_key_var)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with suppress(ConnectionError, ValueError, KeyError, TypeError):  # a server without this route
        answer = send_request("GET", url, server.probe_timeout_seconds, headers=headers).json()
        if (names := [one["id"] for one in answer["data"]]) and model.name not in names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConfigError(
                f"model.name is not set: its default is {model.name}, and {server.urls[0]} serves {shown}; add "
                f"--model.name {shlex.quote(names[0]) if len(names) == 1 else 'NAME'}"
            )


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

    def __init__(self, urls: Sequence[str]) -> None:
        self._load = dict.fromkeys(urls, 0)
        self._lost: dict[str, float] = {}

    @asynccontextmanager
    async def acquire(self, rollouts: int) -> AsyncIterator[str]:
        """Reserve the least loaded server; see `runner.Servers`."""
        now = time.monotonic()
        able = [url for url in self._load if url not in self._lost or now - self._lost[url] >= _EXCLUDED_SECONDS]
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
        deadline = time.monotonic() + _RECONNECT_SECONDS
        async with open_client() as client:
            while time.monotonic() < deadline:
                for url in self._load:
                    with suppress(ConnectionError, TimeoutError):
                        async with asyncio.timeout(5):
                            await request(client, "GET", url)
                        self._lost.pop(url, None)
                        return url
                await asyncio.sleep(_PROBE_SECONDS)
        raise RunError(f"no server responds ({', '.join(self._load)}); run the same command again to resume")


@dataclass(frozen=True, slots=True)
class LeasedServers:
    """Our own servers, leased to load one version after the other."""

    clients: Sequence[InferenceClient]

    async def load_base(self) -> LoadedVersion:
        """Lease the servers and switch to the base model, version 0."""
        return (await asyncio.gather(*(client.reset() for client in self.clients)))[0]

    async def load(self, directory: Path) -> LoadedVersion:
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
            if not client.has_slot:  # a slot is freed with its weights
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


class Servers(Protocol):
    """The inference servers of an evaluation."""

    def acquire(self, rollouts: int) -> AbstractAsyncContextManager[str]:
        """Reserve a server for so many rollouts and return its address; raise RunError if none becomes available.

        InferenceServerLost that leaves the block marks the server as lost.
        """


async def run_examples(
    task: EvalTask,
    pool: EnvironmentPool,
    examples: Sequence[int],
    seq_len: int,
    max_concurrent: int | None,
    servers: Servers,
    on_row: Callable[[ExampleRow], None],
) -> None:
    """Run examples of `pool` and pass each row to `on_row`; raise RunError if the evaluation cannot continue.

    At most `max_concurrent` rollouts are in flight, but at least one example; None is unlimited.
    """
    remaining = iter(examples)
    refusals = 0

    async def run_lane() -> None:
        nonlocal refusals
        for example in remaining:
            row = await _run_example(task, pool, example, seq_len, servers)
            refused = row.failure is not None and row.failure.kind == "refused"
            refusals = refusals + 1 if refused else 0 if row.rollouts else refusals
            on_row(row)
            if refusals >= _MAX_REFUSALS and row.failure is not None:
                raise RunError(f"{refusals} requests in a row were refused; the last: {row.failure.message}")

    lanes = len(examples) if max_concurrent is None else max(1, max_concurrent // task.rollouts)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(lanes, len(examples))):
                tasks.create_task(run_lane())
    except ExceptionGroup as group:
        raise first_exception(group) from group


async def _run_example(
    task: EvalTask, pool: EnvironmentPool, example: int, seq_len: int, servers: Servers
) -> ExampleRow:
    seed = None if task.sampling.seed is None else (task.sampling.seed, example)
    sampling = sampling_parameters(task.sampling)
    while True:
        try:
            async with servers.acquire(task.rollouts) as url:
                rollouts = await pool.run_group(example, task.rollouts, url, sampling, seq_len, seed)
            columns = pool.columns[example] if pool.columns else {}
            return ExampleRow(example, [RolloutRow.of(rollout) for rollout in rollouts], columns=columns)
        except InferenceServerLost:
            continue  # `acquire` limits how long this repeats
        except (EnvironmentFailed, SampleTooLong, InferenceError) as error:
            return ExampleRow(example, failure=ExampleFailure(_FAILURE_KINDS[type(error)], str(error)))
