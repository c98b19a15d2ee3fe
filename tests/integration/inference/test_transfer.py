"""A real publisher and a real server; versions are transferred between memories (I5).

Both sides run vLLM's transfer with a double for the device (tests/support/cpu_transfer.py).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.broadcast import IPCBroadcastConfig, NCCLBroadcastConfig, TransferConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync import memory_sender as sending
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.integration.inference.conftest import ARGUMENTS, assert_greedy_outputs_equal
from tests.support import cpu_transfer
from tests.support.server import inference_server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


class Trainer:
    """A policy whose weights the test sets, and the publisher of its versions."""

    def __init__(self, model: Path, weights: Path, options: TransferConfig) -> None:
        config = TrainerModelConfig(name=str(model))
        world = World(rank=0, size=1, device=torch.device("cpu"))
        self.policy = shard_policy(load_policy(config, seed=0), config, world)
        tokenizer = load_tokenizer(TokenizerConfig(), config)
        self.publisher = Publisher(self.policy, tokenizer, torch.float32, world, options, canary=torch.float32)
        self.weights = weights

    def become(self, model: Path) -> None:
        other = load_policy(TrainerModelConfig(name=str(model)), seed=0)
        with torch.no_grad():
            for mine, theirs in zip(self.policy.parameters(), other.parameters(), strict=True):
                mine.to_local().copy_(theirs)

    def publish(self, step: int, last: bool = False) -> Path:
        target = self.weights / f"step_{step}"
        self.publisher.start(target, PolicyVersion(0, step), last)
        self.publisher.wait()
        return target


@pytest.fixture(scope="module")
def transferring(models, tmp_path_factory):
    """A server with two copies of the model."""
    root = tmp_path_factory.mktemp("transferring")
    arguments = [*ARGUMENTS, "--parallel.dp", "2", "--vllm.kv_cache_memory_bytes", "64M"]
    with inference_server(
        models.base, root / "server.log", arguments, {"TMPDIR": str(root)}, module="tests.support.cpu_transfer"
    ) as server:
        yield server


@pytest.fixture
def start(models, tmp_path, monkeypatch, transferring):
    cpu_transfer.install(monkeypatch.setattr, tmp_path)
    monkeypatch.setattr(sending, "_BUFFER_BYTES", 2**16)  # several buffers a version
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    started: list[Trainer] = []

    def start(options: TransferConfig) -> Trainer:
        started.append(Trainer(models.base, tmp_path / "weights", options))
        return started[-1]

    transferring.reload()
    yield start
    for trainer in started:
        trainer.publisher.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [NCCLBroadcastConfig, IPCBroadcastConfig])
async def test_ten_transferred_switches_equal_one_switch_by_files(start, transferring, server, models, kind):
    trainer = start(kind(port=0, timeout_seconds=60))
    for step in range(1, 11):
        trainer.become([models.published[2], models.base, models.published[1]][(step - 10) % 3 - 1])
        directory = trainer.publish(step)
        assert not list(directory.glob("*.safetensors"))
        answer = transferring.update(directory, step)
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        assert answer["hash"] == manifest["hash"] == transferring.policy()["hash"]
        assert answer["canary_difference"] <= 1e-4
        shutil.rmtree(trainer.weights / f"step_{step - 1}", ignore_errors=True)
    assert manifest["hash"] == server.update(models.published[1], 1)["hash"]
    await assert_greedy_outputs_equal(transferring, server)
    assert list(trainer.publish(11, last=True).glob("*.safetensors"))
    assert transferring.update(trainer.weights / "step_11", 11)["hash"] == manifest["hash"]


def test_altered_tensor_is_refused_and_sampling_continues(start, transferring, models):
    trainer = start(NCCLBroadcastConfig(port=0, timeout_seconds=60))
    trainer.become(models.published[1])
    loaded = transferring.update(trainer.publish(1), 1)
    trainer.become(models.published[2])
    directory = trainer.publish(2)
    sender = trainer.publisher._transport._sender
    assert sender is not None
    tensors = sender._versions[json.loads((directory / "manifest.json").read_text())["hash"]][1]
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1
    answer = transferring.post("/update_weights", weight_dir=str(directory), step=2)
    assert answer.status_code == 400
    assert f"{directory} could not be fetched: tensor {name} from the trainer at localhost" in answer.json()["error"]
    assert transferring.policy()["hash"] == loaded["hash"]
    assert len(transferring.generate([1, 2, 3])["token_ids"]) == 8
    tensors[name].view(-1)[0] -= 1
    answer = transferring.post("/update_weights", weight_dir=str(directory), step=1)
    assert answer.status_code == 400
    assert "declares branch 0, step 2; requested was branch 0, step 1" in answer.json()["error"]
    assert transferring.update(directory, 2)["step"] == 2


def test_update_after_the_end_of_the_trainer_is_refused(start, transferring, models):
    trainer = start(NCCLBroadcastConfig(port=0, timeout_seconds=60))
    trainer.become(models.published[1])
    directory = trainer.publish(1)
    trainer.publisher.close()
    answer = transferring.post("/update_weights", weight_dir=str(directory), step=1)
    assert answer.status_code == 400
    assert "could not be fetched: the trainer at localhost:" in answer.json()["error"]
    assert len(transferring.generate([1, 2, 3])["token_ids"]) == 8
