"""Runs of the orchestrator over HTTP: with fake engines, environments without workers, a trainer without a model."""

import asyncio
import itertools
import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import numpy as np

from prime_rl.configs.checkpoint import CkptConfig
from prime_rl.configs.client import ClientConfig
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import first_exception
from prime_rl.core.types import Credit, Rollout, Sample
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.orchestrator import OrchestratorLoop
from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
from prime_rl.orchestrator.resume import find_start_point
from prime_rl.orchestrator.waits import ProgressWatchdog
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.workers.protocol import DiscardedWork, RolloutSeconds
from prime_rl.storage.batch import read_batch
from prime_rl.storage.checkpoint_artifacts import ORCHESTRATOR, TRAINER, commit_checkpoint, prepare_part, seal_part
from prime_rl.storage.paths import RunPaths
from tests.support.fake_engine import fake_engine, play_trainer

STEPS = 6


class LocalEnvironment:
    """An `EnvironmentPool` without workers. A rollout is one turn; its reward is the example's share of all.

    Arguments of the environment:
        examples: their number.
        spread: every other rollout gets 1 more.
        agents: a rollout has two agents, with rewards of their own.
        fail, down: all groups fail, or as long as there is the file `down`.
        stuck, slow, bad, flaky: examples that never end, whose scoring never ends or fails, or that lose a rollout.
    """

    def __init__(self, env: EnvConfig, model: str, stack: AsyncExitStack) -> None:
        self.name, self.args = env.label, env.args
        self.content_hash, self.skipped, self.deaths = "", [], 0
        self.discarded, self.seconds = DiscardedWork(), RolloutSeconds()
        self._model, self._stack = model, stack
        self._clients: dict[str, InferenceClient] = {}
        self._played = itertools.count()

    def __len__(self):
        return self.args.get("examples", 12)

    def memory_bytes(self):
        return 2**30

    async def run_group(self, example, count, url, sampling, seq_len, seed=None, on_scoring=lambda: None):
        if self.args.get("fail") or Path(self.args.get("down", "no such file")).exists():
            raise EnvironmentFailed("KeyError: 'broken environment'")
        if example in self.args.get("stuck", ()):
            await asyncio.Event().wait()
        if url not in self._clients:
            client = InferenceClient(url, self._model, "rollouts")
            self._clients[url] = await self._stack.enter_async_context(client)
        try:
            async with asyncio.TaskGroup() as tasks:
                play = partial(self._play, example, self._clients[url])
                given = {**sampling, "max_tokens": min(sampling["max_tokens"], seq_len - 2)}
                seeds = [{} if seed is None else {"seed": [*seed, index]} for index in range(count)]
                running = [tasks.create_task(play(given | own)) for own in seeds]
        except ExceptionGroup as group:
            raise first_exception(group) from None
        rollouts = [task.result() for task in running]
        on_scoring()
        if example in self.args.get("slow", ()):
            await asyncio.Event().wait()
        if example in self.args.get("bad", ()):
            self.discarded.add("failed", count, sum(rollout.sampled_tokens for rollout in rollouts))
            raise EnvironmentFailed("reward function reward raised KeyError: 'broken reward'")
        if example in self.args.get("flaky", ()):
            self.discarded.add("failed", 1, rollouts.pop().sampled_tokens)
        return rollouts

    async def _play(self, example, client, sampling):
        reward = example / len(self) + (next(self._played) % 2 if self.args.get("spread") else 0)
        names = ("first", "second") if self.args.get("agents") else ("",)
        samples = [await self._sample([5, 100 + example], client, sampling) for _ in names]
        credits = ()
        if self.args.get("agents"):
            credits = tuple(Credit(name, float(next(self._played) * (index + 1))) for index, name in enumerate(names))
            samples = [
                Sample(s.tokens, s.loss_mask, s.logprobs, s.versions, np.full(len(s), index, np.int32))
                for index, s in enumerate(samples)
            ]
        text = (("user", f"say it {example}"), ("assistant", "so"))
        return Rollout(tuple(samples), reward, {"score": reward}, False, text, credits=credits)

    async def _sample(self, prompt, client, sampling):
        sampled = await client.generate(prompt, sampling)
        before = [0] * len(prompt)
        return Sample(
            np.array([*prompt, *sampled.token_ids], np.int32),
            np.array([*before, *np.ones(len(sampled.token_ids))], bool),
            np.array([*before, *sampled.logprobs], np.float32),
            np.array([*[-1] * len(prompt), *sampled.versions], np.int32),
        )


def make_config(tmp_path, env_args=None, **values):
    given = {
        "model": {"name": "no-model"},
        "env": [toy("toy_environment", **(env_args or {}))],
        "batch_size": 6,
        "rollouts_per_example": 2,
        "seq_len": 64,
        "sampling": {"max_tokens": 6},
        "max_steps": STEPS,
        "output_dir": tmp_path / "run",
        "wait_timeout_seconds": 60,
        "failing_env_seconds": 0,
    }
    return OrchestratorConfig(**(given | values))


def toy(name, **args):
    return EnvConfig(id="toy_environment", name=name, args=args)


async def run_loop(config, start_point, schedules=(), launcher=None):
    """Run one `OrchestratorLoop`; with a launcher of workers, its environments have workers."""
    async with AsyncExitStack() as stack:
        if launcher is None:
            model = config.model.lora.name or config.model.name
            environments = [LocalEnvironment(env, model, stack) for env in config.env]
        else:
            environments = await start_environments(config, launcher, model_access(config), stack)
        servers = [await connect(config, url, stack) for url in config.client.urls]
        monitor = Monitor(config.run_paths, "orchestrator", None)
        stack.callback(monitor.close)
        loop = OrchestratorLoop(config, environments, servers, monitor, start_point=start_point, schedules=schedules)
        await loop.run()


def with_engines(config, engines):
    return config.model_copy(update={"client": ClientConfig(base_url=[engine.url for engine in engines])})


async def run_orchestrator(
    config, engines=None, trainer_delay_seconds=0.0, trainer=play_trainer, schedules=(), launcher=None
):
    """Run the orchestrator and a trainer to their ends; return the paths of the run."""
    if engines is None:
        async with fake_engine() as engine:
            return await run_orchestrator(config, [engine], trainer_delay_seconds, trainer, schedules, launcher)
    paths, stop = RunPaths(config.output_dir), asyncio.Event()
    training = asyncio.create_task(trainer(paths, config.max_steps, stop, trainer_delay_seconds))
    config = with_engines(config, engines)
    try:
        await run_loop(config, await asyncio.to_thread(find_start_point, config), schedules, launcher)
        await training
    finally:
        stop.set()
        training.cancel()
    return paths


async def no_trainer(paths, steps, stop, delay_seconds):
    await stop.wait()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def cancel(run):
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def limit_waits(monkeypatch, timeouts_seconds):
    """Give the waits for each peer their own `wait_timeout_seconds`, so that a test expects one of them to end."""
    wait = ProgressWatchdog.wait

    async def limited(self, wake, progress_token, phase, role, *rest, **place):
        self._timeout_seconds = timeouts_seconds[role]
        await wait(self, wake, progress_token, phase, role, *rest, **place)

    monkeypatch.setattr(ProgressWatchdog, "wait", limited)


def random_pauses(mean_seconds, seed=0):
    """A gate of a fake engine that holds each request for a random time."""
    rng = np.random.default_rng(seed)

    async def gate(_):
        await asyncio.sleep(rng.exponential(mean_seconds))

    return gate


def with_ckpt(config, interval=4, **keys):
    return config.model_copy(update={"ckpt": CkptConfig(interval=interval, **keys)})


def commit(paths, step, branch=0, others=(ORCHESTRATOR,)):
    """Commit the checkpoint as the trainer does after saving its part; `others` are saved already."""
    checkpoint = paths.checkpoint(step)
    seal_part(prepare_part(checkpoint, TRAINER), checkpoint / TRAINER, {}, {})
    commit_checkpoint(checkpoint, branch, [TRAINER, *others], "")


def batches(paths, steps=STEPS):
    return [read_batch(paths.rollouts(step), step) for step in range(steps)]


def group_ids(paths, steps=STEPS):
    return [group for _, manifest in batches(paths, steps) for group in manifest["group_ids"]]


def samples(paths, *steps):
    return [json.loads(line) for step in steps for line in paths.samples(step).read_text().splitlines()]


def metrics(paths):
    return json_lines(paths.metrics("orchestrator"))


def json_lines(file):
    """Return the complete lines of a file, which may be missing, or in the middle of a write."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def records(paths, kind):
    return [line for line in json_lines(paths.ledger(0)) if line["record"] == kind]


def check_bound(paths, bound):
    """Check that no token is older than the staleness bound allows (I1), or of a version that its batch has to make."""
    for step, (batch, _) in enumerate(batches(paths)):
        versions = batch.versions[batch.loss_mask == 1]
        assert versions.min() >= 0 and step - versions.min() <= bound
        assert versions.max() <= step


def check_progress(paths):
    """Check that the totals of the metrics are those of all batches so far, after any restart or rollback."""
    totals = np.cumsum([(len(b.tokens), len(b.seq_lens), len(m["group_ids"])) for b, m in batches(paths)], axis=0)
    for step, (row, total) in enumerate(zip(metrics(paths), totals.tolist(), strict=True)):
        assert (row["step"], row["progress/step"]) == (step, step + 1)
        assert [row[f"progress/{name}"] for name in ("tokens", "samples", "problems")] == total
