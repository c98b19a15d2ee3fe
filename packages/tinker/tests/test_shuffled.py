"""Operations in any order of arrival, some of them twice, at the real trainer: bit for bit as one after another."""

import asyncio
import json
import os
import random
import subprocess
import sys

import aiohttp
import numpy as np
import pytest
from tests.support.server import free_port
from tests.support.tiny_model import make_tiny_model
from tinker.proto import tinker_public_pb2 as pb

from prime_rl.configs.loading.base_config import write_config
from prime_rl_tinker.api_main import serve
from prime_rl_tinker.config import TinkerConfig

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
COUNT = 1000
"""Operations of each model."""
WINDOW = 40
"""Operations in flight."""


def body_of(model, number):
    """Return route and body of an operation: mostly passes, a step after each ten, now and then saved weights."""
    if number % 250 == 0:
        return "save_weights", {"json": {"model_id": model, "seq_id": number, "path": f"s{number}"}}
    if number % 10 == 0:
        adam = {"learning_rate": 1e-2 / number, "grad_clip_norm": 1.0}
        return "optim_step", {"json": {"model_id": model, "seq_id": number, "adam_params": adam}}
    drawn = np.random.default_rng(number)
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    request.forward_only = number % 7 == 0
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = drawn.integers(0, 128, 5, dtype=np.int32).tobytes()
    targets = pb.Tensor(dense=drawn.integers(0, 128, 5).tobytes(), dtype=pb.DTYPE_INT64, shape=[5])
    datum.loss_fn_inputs["target_tokens"].CopyFrom(targets)
    return "forward_backward", {"data": request.SerializeToString()}


class Client:
    """Sends operations without the SDK, which orders them."""

    def __init__(self, http):
        self.http = http

    async def post(self, route, **body):
        async with self.http.post(route, **body) as response:
            content = await response.read()
            assert response.status == 200, content
            return content

    async def model(self):
        session = json.loads(await self.post("create_session", json={}))["session_id"]
        lora = {"rank": 4, "seed": 3, "train_mlp": False, "train_unembed": False}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "m", "lora_config": lora}
        await self.result(json.loads(await self.post("create_model", json=body)))
        return f"{session}:train:0"

    async def result(self, future):
        while True:
            content = await self.post("retrieve_future", json={"request_id": future["request_id"]})
            if b"try_again" not in content:
                assert b'"error"' not in content, content
                return content

    async def run(self, model, number):
        route, body = body_of(model, number)
        return json.loads(await self.post(route, **body))

    async def sequential(self, model):
        futures = [await self.run(model, number) for number in range(1, COUNT + 1)]
        return [await self.result(future) for future in futures]

    async def shuffled(self, model, seed):
        """Send a window of operations in any order, 5 % twice, and wait for the oldest of them only."""
        order, drawn = list(range(1, COUNT + 1)), random.Random(seed)
        futures = {}
        for begin in range(0, COUNT, WINDOW):
            part = order[begin : begin + WINDOW]
            part += [number for number in part if drawn.random() < 0.05]
            drawn.shuffle(part)
            for number, future in zip(part, await asyncio.gather(*(self.run(model, n) for n in part)), strict=True):
                assert futures.setdefault(number, future) == future
        return [await self.result(futures[number]) for number in order]


async def test_shuffled_operations_equal_the_sequential_ones(tmp_path):
    path, port = make_tiny_model(tmp_path / "model"), free_port()
    config = TinkerConfig(
        output_dir=tmp_path / "out", aliases_of_model={"m": str(path)}, model={"name": str(path), "seq_len": 16},
        server={"port": port, "session_timeout_seconds": 3600},
    )  # fmt: skip
    for folder in (config.run_paths.heartbeats_dir, config.run_paths.logs_dir):
        folder.mkdir(parents=True)
    write_config(config, config.run_paths.config("tinker"))
    serving = asyncio.ensure_future(serve(config, "qwen3", 128))  # sampling alone needs the inference server
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    trainer = subprocess.Popen(
        [sys.executable, "-m", "prime_rl_tinker.trainer_main", "@", str(config.run_paths.config("tinker"))],
        env=env | {"OMP_NUM_THREADS": "1"},
    )
    try:
        url = f"http://127.0.0.1:{port}/api/v1/"
        timeout, headers = aiohttp.ClientTimeout(total=None), {"X-API-Key": "tml-test"}
        connector = aiohttp.TCPConnector(keepalive_timeout=1)  # the server closes idle ones later
        async with aiohttp.ClientSession(url, connector=connector, headers=headers, timeout=timeout) as http:
            while not serving.done():
                try:
                    async with http.get("healthz"):
                        break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)
            client = Client(http)
            alone = await client.model()
            expected = await client.sequential(alone)
            models = [await client.model() for _ in range(2)]
            found = await asyncio.gather(*(client.shuffled(model, seed) for seed, model in enumerate(models)))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    finally:
        trainer.kill()
        trainer.wait()
    for model, results in zip(models, found, strict=True):
        assert [one.replace(model.encode(), alone.encode()) for one in results] == expected
        for number in range(250, COUNT + 1, 250):
            files = [
                (config.output_dir / "models" / name / "weights" / f"s{number}" / file).read_bytes()
                for name in (alone, model)
                for file in ("adapter_model.safetensors", "optimizer.state")
            ]
            assert files[:2] == files[2:]
