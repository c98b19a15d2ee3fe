"""A real publisher and a real server; versions are transferred between memories (I5).

Both sides run vLLM's transfer with a double for the device (tests/support/cpu_transfer.py).
"""

import json
import shutil

import pytest

from prime_rl.configs.training.broadcast import IPCBroadcastConfig, NCCLBroadcastConfig, TransferConfig
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.trainer.weight_sync import memory_sender as sending
from tests.integration.inference.conftest import ARGUMENTS, assert_greedy_outputs_equal
from tests.integration.inference.policy_publisher import PolicyPublisher, process_group
from tests.support import cpu_transfer
from tests.support.server import inference_server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


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
    started: list[PolicyPublisher] = []

    def start(options: TransferConfig) -> PolicyPublisher:
        started.append(PolicyPublisher(models.base, tmp_path / "weights", options))
        return started[-1]

    transferring.reload()
    with process_group():
        yield start
        for trainer in started:
            trainer.publisher.close()


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
    assert f"{directory} could not be fetched: tensor {name} from the trainer at 127.0.0.1" in answer.json()["error"]
    assert transferring.policy()["hash"] == loaded["hash"]
    assert len(transferring.generate([1, 2, 3])["token_ids"]) == 8
    tensors[name].view(-1)[0] -= 1
    answer = transferring.post("/update_weights", weight_dir=str(directory), step=1)
    assert answer.status_code == 400
    assert "declares branch 0, step 2; requested was branch 0, step 1" in answer.json()["error"]
    assert transferring.update(directory, 2)["step"] == 2
