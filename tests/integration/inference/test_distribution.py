"""From `weights/` to a real server by the orchestrator's code: invalid versions, and their effect on a run.

And responses without version spans: one version samples all tokens, also over several requests.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import ConcurrencyController
from prime_rl.orchestrator.inference.inference_server import InferenceServer as Steered
from prime_rl.orchestrator.inference.weight_versions import InvalidWeights
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.clients.openai_chat_client import ChatServer
from prime_rl.rollouts.recorder import Recorder
from prime_rl.storage.paths import RunPaths, steps_in
from tests.integration.inference.conftest import METRIC_TIMEOUT_SECONDS, PROMPT, Models, Reference, metric, versions_of
from tests.support.server import REQUEST_TIMEOUT_SECONDS, Server
from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


def _flip(directory: Path) -> None:
    shard = directory / "model-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)


def _cut(directory: Path) -> None:
    with (directory / "model-00002.safetensors").open("r+b") as stream:
        stream.truncate(1000)


def _lose(directory: Path) -> None:
    (directory / "model-00002.safetensors").unlink()


def _declare(**fields: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _widen(directory: Path) -> None:
    """Another model, correctly published."""
    tensors = load_file(directory / "model-00001.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].repeat(2, axis=0)
    model = directory.parent / ".model"
    for file in directory.glob("*.safetensors"):
        model.mkdir(exist_ok=True)
        save_file(tensors if file.name.startswith("model-00001") else load_file(file), model / file.name)
    step = json.loads((directory / "manifest.json").read_text())["step"]
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    publish_weights(directory.parents[1], model, step)


BAD = {
    "a flipped byte": (_flip, r"{dir}/model-00002\.safetensors differs from its manifest: tensor \S+ has another hash"),
    "a cut file": (_cut, r"{dir}/model-00002\.safetensors has 1000 bytes, its manifest says \d+"),
    "a missing shard": (_lose, r"{dir}/model-00002\.safetensors is missing; its manifest says it has \d+ bytes"),
    "a wrong step": (_declare(step=99), r"{dir}/manifest\.json declares step 99"),
    "a smaller version": (_declare(branch=0), r"version 0\.\d+ .* of {dir} is older than the loaded version 1\.\d+"),
    "another shape": (_widen, r"tensor \S+ of {dir}/model-00001\.safetensors has shape"),
    "a wrong canary": (None, r"version 1\.\d+ of {dir} is loaded, but is not the trainer's"),
}


@asynccontextmanager
async def steering(server: Server, run_dir: Path, **options: Any) -> AsyncIterator[tuple[InferencePool, asyncio.Event]]:
    """A pool with `server` for a run; the event is set after every change."""
    changed, stop = asyncio.Event(), asyncio.Event()
    async with InferenceClient(server.url, server.model, f"run {run_dir}") as engine:
        steered = Steered(engine, ConcurrencyController(ConcurrencyConfig(), seq_len=64))
        policy = InferencePool([steered], RunPaths(run_dir), changed.set, **options)
        await policy.start(METRIC_TIMEOUT_SECONDS)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(policy.follow_weights(stop))
                tasks.create_task(policy.maintain(stop))
                try:
                    yield policy, changed
                finally:
                    stop.set()
        finally:
            await policy.release()


async def until(changed: asyncio.Event, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(METRIC_TIMEOUT_SECONDS):
        while not condition():
            changed.clear()
            await changed.wait()


@pytest.fixture(scope="module")
def shards(models, tmp_path_factory):
    """The model of version 1 in three files; good versions are of the other one, so that every bad one is read."""
    directory = tmp_path_factory.mktemp("shards")
    tensors = load_file(models.published[1] / "model.safetensors")
    for number in range(3):
        part = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(part, directory / f"model-{number + 1:05}.safetensors")
    return directory


def publish_bad(kind: str, run_dir: Path, shards: Path, models: Models, reference: Reference, step: int) -> str:
    """Publish an invalid version; returns the pattern of its error.

    It is damaged in another run directory and then moved.
    """
    damage, message = BAD[kind]
    overrides = reference.canary(models.published[2]) if damage is None else None
    directory = publish_weights(run_dir.with_name("unseen"), shards, step, branch=1, overrides=overrides)
    if damage is not None:
        damage(directory)
    if kind == "another shape":
        _declare(branch=1)(directory)
    place = RunPaths(run_dir).weights(step)
    place.parent.mkdir(parents=True, exist_ok=True)
    directory.rename(place)
    return message.format(dir=place)


async def test_invalid_versions_are_skipped_and_sampling_continues(server, models, shards, reference, tmp_path):
    """Each invalid version is followed by a valid one; completions in flight are not affected."""
    run_dir = tmp_path / "run"
    async with (
        steering(server, run_dir, on_refused="keep") as (policy, changed),
        httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_SECONDS) as client,
    ):
        publish_weights(run_dir, models.published[2], 1, branch=1)
        await until(changed, lambda: policy.version == 1)
        for number, kind in enumerate(BAD):
            before, bad = policy.version, 2 * number + 2
            start = metric(server, "vllm:generation_tokens_total")
            body = server.request([*PROMPT, 6 + number], max_tokens=150)
            completion = asyncio.create_task(client.post("/inference/v1/generate", json=body))
            while metric(server, "vllm:generation_tokens_total") <= start:
                await asyncio.sleep(0)
            message = publish_bad(kind, run_dir, shards, models, reference, bad)
            await until(changed, lambda bad=bad: bad in policy.weight_versions.refused and policy.servers[0].up)
            with pytest.raises(InvalidWeights, match=message):
                raise policy.weight_versions.refused[bad]
            loaded = await asyncio.to_thread(server.policy)
            assert (loaded["branch"], loaded["step"]) == (1, before), kind
            answer = await completion
            if kind != "a wrong canary":  # then the completion is discarded
                assert versions_of(answer.json()["choices"][0]) == [(f"1.{before}", 0, 150)], kind
            publish_weights(run_dir, models.published[2], bad + 1, branch=1)
            await until(changed, lambda bad=bad: policy.version == bad + 1)
        assert policy.metrics()["policy/refused"] == len(BAD)
        assert policy.metrics()["weights/versions_skipped"] == 0
        assert steps_in(RunPaths(run_dir).weights_dir)[-1] == policy.version


async def test_chat_completion_is_sampled_by_one_version(server, models, tmp_path):
    """A switch waits for the response, streamed or not."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "say it"}], "ignore_eos": True}
    body |= {"max_tokens": 400, "temperature": 0, "logprobs": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_SECONDS) as client:
        alone = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        for step, streamed in ((1, False), (2, True)):
            before = server.policy()["step"]
            start = metric(server, "vllm:generation_tokens_total")
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body | {"stream": streamed}))
            while metric(server, "vllm:generation_tokens_total") <= start + 5:
                await asyncio.sleep(0)
            switched = await asyncio.to_thread(server.update, models.published[step], step)
            assert asked.done() or (await asyncio.wait({asked}, timeout=METRIC_TIMEOUT_SECONDS))[0], (
                "the response was complete before the switch"
            )
            answer = await asked
            assert answer.headers["x-policy-version"] == f"0.{before}"
            if not streamed:
                assert answer.headers["x-policy-version-end"] == f"0.{before}"
                assert answer.json()["choices"][0]["message"]["content"] == alone
            assert switched["step"] == step
            assert switched["pause_s"] < 5, "the wait is not part of the pause"


async def test_pinned_rollout_is_sampled_by_one_version(server, models):
    """A switch waits while the rollout continues with the old version; it runs afterwards."""
    ask = [{"role": "user", "content": "say it"}]
    async with ChatServer(f"{server.url}/v1", server.model) as chat:
        async with chat.pinned() as pinned:
            recorder = Recorder(pinned)
            first = await recorder.ask(ask, None, {"max_tokens": 20})
            switch = asyncio.create_task(asyncio.to_thread(server.update, models.published[1], 1))
            await asyncio.wait({switch}, timeout=1)  # time for a wrong switch
            second = await recorder.ask(ask, None, {"max_tokens": 20})
            assert first.versions == second.versions == (0, 0)
            assert not switch.done()
            assert server.policy()["step"] == 0
        assert (await switch)["step"] == 1
        again = await Recorder(chat).ask(ask, None, {"max_tokens": 20})
        assert again.versions == (1, 1)
