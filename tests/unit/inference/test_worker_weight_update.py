"""Staging in a worker: a dropped version does not affect the next one."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.delta_cache import DeltaCache
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.storage.weights.transfer_channel import TransferDescriptor
from tests.support.deltas import publish_full
from tests.support.vllm_modules import LazyModule, needs_vllm
from tests.unit.inference.test_shadow_weights import Model, _make, _weights

pytestmark = needs_vllm

update = LazyModule("prime_rl.inference.worker.worker_weight_update")
shadow = LazyModule("prime_rl.inference.worker.shadow_weights")

TIMEOUT_SECONDS = 60


class Gated(Model):
    """Its loader waits at a tensor with one value until the test opens the gate."""

    value = 5.0

    def arm(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.loaded: list[float] = []
        self.first.weight.weight_loader, self.second.weight.weight_loader = self.wait, self.note

    def wait(self, parameter: Tensor, loaded: Tensor) -> None:
        if float(loaded[0, 0]) == self.value:
            self.entered.set()
            assert self.gate.wait(TIMEOUT_SECONDS)
        parameter.data.copy_(loaded * 2)

    def note(self, parameter: Tensor, loaded: Tensor) -> None:
        self.loaded.append(float(loaded[0, 0]))
        parameter.data.copy_(loaded * 3)


def _worker(model: Model) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None), lora_config=None, parallel_config=None)
    runner = SimpleNamespace(get_model=lambda: model, reset_encoder_cache=lambda: None, reset_mm_cache=lambda: None)
    return SimpleNamespace(
        vllm_config=config,
        device=torch.device("cpu"),
        model_runner=runner,
        model_config=SimpleNamespace(dtype=torch.float32),
    )


def _save(root: Path, value: float) -> Path:
    directory = root / f"step_{value:.0f}"
    directory.mkdir()
    save_file(_weights(float(value)), directory / "model.safetensors")
    return directory


def _until(condition: Callable[[], bool], seconds: float = TIMEOUT_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)  # the state of a version has no event: a server polls it, too
    return condition()


def _staging_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stage"]


def make_gated(tmp_path: Path) -> tuple[Any, Gated, Path]:
    """The updates of a worker with such a model, the model, and a directory."""
    model = _make(Gated)
    model.arm()
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    return update.WorkerWeightUpdate(_worker(model), _save(tmp_path, 1), DeltaCache(tmp_path / "here")), model, tmp_path


@pytest.fixture
def gated(tmp_path):
    return make_gated(tmp_path)


def _stage(one: Any, root: Path, value: float) -> None:
    directory = _save(root, value)
    one.stage(f"v{value:.0f}", str(directory), hash_tensors(directory))


def _stage_all(one: Any, root: Path) -> None:
    """Stage version 6 completely."""
    _stage(one, root, 6)
    assert _until(lambda: one.state("v6")["state"] == "staged")


@pytest.mark.parametrize("emulates_cuda", [True, False])
def test_dropped_version_does_not_write_to_the_memory_of_the_next(gated, monkeypatch, emulates_cuda):
    """On a GPU all versions use the same page-locked buffer."""
    one, model, root = gated
    if emulates_cuda:
        locked: list[int] = []
        monkeypatch.setattr(
            "prime_rl.inference.worker.shadow_weights.lock_pages", lambda buffer: locked.append(buffer.nbytes)
        )
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        one._host = shadow.HostBuffer()
    _stage(one, root, 5)
    assert model.entered.wait(TIMEOUT_SECONDS), "the first tensor of version 5 is being loaded, the others were read"
    one.drop("v5")
    dropped = _staging_threads()
    _stage(one, root, 6)
    _until(lambda: one.state("v6")["state"] == "staged", seconds=0.2)  # times out unless version 6 fails to wait
    model.gate.set()
    for thread in dropped:
        thread.join(TIMEOUT_SECONDS)
    assert _until(lambda: one.state("v6")["state"] != "staging")
    assert one.state("v6")["state"] == "staged", one.state("v6")["error"]
    one.load("v6")
    expected = {"first.weight": 12.0, "second.weight": 18.0, "statistics": 6.0}
    assert {name: set(model.state_dict()[name].flatten().tolist()) for name in expected} == {
        name: {value} for name, value in expected.items()
    }
    if emulates_cuda:
        assert len(locked) == 1, "one buffer for all versions"


def _use_vllms_reload(one: Any) -> dict[str, float]:
    """Switch the weights of this worker by vLLM's reload; returns what the reload gets."""
    given: dict[str, float] = {}

    def reload_weights(weights_iterator: Any) -> None:
        given.update({name: float(tensor.flatten()[0]) for name, tensor in weights_iterator})

    one._unsupported = "weights are quantized"
    vars(one._worker).update(reload_weights=reload_weights)
    return given


def test_version_for_vllms_reload_is_not_kept_in_memory(gated):
    """Each worker would keep the whole checkpoint, and a node has up to eight."""
    one, _, root = gated
    given = _use_vllms_reload(one)
    _stage_all(one, root)
    assert one.state("v6")["bytes"] == sum(tensor.nbytes for tensor in _weights(6.0).values())
    assert one._versions["v6"].tensors == []
    one.load("v6")
    assert given == dict.fromkeys(_weights(6.0), 6.0)


def test_load_of_a_version_changed_after_staging_raises(gated):
    one, _, root = gated
    _use_vllms_reload(one)
    _stage_all(one, root)
    save_file(_weights(7.0), root / "step_6/model.safetensors")
    with pytest.raises(ArtifactError, match=r"step_6/model.safetensors differs from its manifest"):
        one.load("v6")


def test_transferred_version_larger_than_the_memory_is_rejected(gated, monkeypatch):
    one, _, root = gated
    _use_vllms_reload(one)
    one._worker.vllm_config.parallel_config = SimpleNamespace(world_size=8, data_parallel_size_local=1)
    monkeypatch.setattr(update.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    tensors = {"model.embed": ("BF16", (70_000_000, 1000))}
    request = TransferDescriptor("nccl", "localhost", 1, "session", 1.0, tensors).fields()
    one.stage("v6", str(root), {}, request)
    assert _until(lambda: one.state("v6")["state"] == "failed")
    assert "8 workers of this node would each hold 130.4 GiB" in one.state("v6")["error"]
    assert "1024.0 GiB of memory are free; set weight_broadcast.type = filesystem" in one.state("v6")["error"]


def test_measure_with_a_staged_version_returns_an_error(gated, monkeypatch):
    """On a GPU both use the same page-locked buffer."""
    one, model, root = gated
    monkeypatch.setattr("prime_rl.inference.worker.shadow_weights.lock_pages", lambda buffer: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    one._host = shadow.HostBuffer()
    _stage_all(one, root)
    assert "a version is staged" in one.measure()["error"]
    one.load("v6")
    assert torch.equal(model.second.weight, torch.full((3, 3), 18.0))
    assert _until(lambda: not _staging_threads())
    assert one.measure()["bytes"] > 0


def test_dropped_version_stops_at_its_next_tensor(gated):
    one, model, root = gated
    _stage(one, root, 5)
    assert model.entered.wait(TIMEOUT_SECONDS)
    one.drop("v5")
    model.gate.set()
    for thread in _staging_threads():
        thread.join(TIMEOUT_SECONDS)
    assert model.loaded == [1.0], "of the base model, once"


def test_end_waits_for_the_threads_that_hold_tensors(gated, monkeypatch):
    """Such a thread would abort a process that exits."""
    one, model, root = gated
    go = threading.Event()
    monkeypatch.setattr(shadow.ShadowWeights, "free_replaced", lambda _: go.wait(TIMEOUT_SECONDS))
    _stage_all(one, root)
    one.load("v6")
    _stage(one, root, 5)
    assert model.entered.wait(TIMEOUT_SECONDS)
    threads = [thread for thread in threading.enumerate() if thread.name in ("stage", "free")]
    assert {thread.name for thread in threads} == {"stage", "free"}
    end = threading.Thread(target=one.end)
    end.start()
    assert _until(lambda: one.state("v5")["state"] == "gone") and end.is_alive()
    go.set()
    model.gate.set()
    end.join(TIMEOUT_SECONDS)
    assert not [thread for thread in threads if thread.is_alive()]


def test_damaged_copy_of_a_delta_is_rebuilt_while_it_is_staged(gated):
    """Its sizes and times are those of its marker, so only the hashes of the tensors show the damage."""
    one, model, root = gated
    tensors = {name: tensor.numpy() for name, tensor in _weights(6.0).items()}
    published = publish_full(root / "step_6", tensors, PolicyVersion(0, 6))
    copy = one._cache.complete(published, lambda: None)
    for file in copy.glob("*.safetensors"):
        times, content = file.stat(), bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    one.stage("v6", str(published), json.loads((published / "manifest.json").read_text())["tensors"])
    assert _until(lambda: one.state("v6")["state"] != "staging")
    assert one.state("v6")["state"] == "staged", one.state("v6")["error"]
    assert one.state("v6")["bytes"] > 0
    one.load("v6")
    assert set(model.state_dict()["second.weight"].flatten().tolist()) == {18.0}


def test_damaged_published_delta_is_rejected_after_one_more_attempt(gated):
    one, _, root = gated
    tensors = {name: tensor.numpy() for name, tensor in _weights(6.0).items()}
    published = publish_full(root / "step_6", tensors, PolicyVersion(0, 6))
    one.stage("v6", str(published), dict.fromkeys(tensors, "0" * 32))
    assert _until(lambda: one.state("v6")["state"] == "failed")
    assert "differs from its manifest" in one.state("v6")["error"]


def test_load_has_the_configuration_that_layers_of_experts_need(gated, monkeypatch):
    from vllm.config import get_current_vllm_config_or_none

    one, _, root = gated
    seen: list[Any] = []
    load = shadow.ShadowWeights.load_into_model

    def note(self: Any, kept: frozenset[str]) -> None:
        seen.append(get_current_vllm_config_or_none())
        load(self, kept)

    monkeypatch.setattr(shadow.ShadowWeights, "load_into_model", note)
    _stage_all(one, root)
    one.load("v6")
    assert seen == [one._worker.vllm_config]
    assert get_current_vllm_config_or_none() is None
