"""An exported checkpoint equals the published version, and loads in transformers and peft."""

import io
import os
import pickle
import random
import threading
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta, TensorProperties
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from prime_rl.configs.checkpoint import SKIPPED, CkptConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.daemon_futures import start_daemon_future
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.entrypoints.delivery.policy_export import ExportForm, export_policy
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.batch import Progress
from prime_rl.storage.checkpoint_artifacts import COMMITTED
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import RESTART_VARIABLE, START_VARIABLE
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer, changed_settings
from prime_rl.trainer.checkpoints.trainer_state import TensorReader, restore_rng, rng_tensors, seed_rng
from prime_rl.trainer.export import model_config
from prime_rl.trainer.model.policy_model import build_policy
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import SMALL, save
from tests.unit.trainer.test_rope import HEAD_DIM, LONGEST, ROPES
from tests.unit.trainer.world import run_command, run_world

LORA = ["--model.lora.rank", "4", "--model.lora.target-modules", "q_proj,down_proj"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Full weights and adapters: two steps of sft each, with a checkpoint of the last."""
    root = tmp_path_factory.mktemp("runs")
    make_tiny_model(root / "model", std=0.05)
    for name, more in (("full", []), ("lora", LORA)):
        arguments = ["--model.name", root / "model", "--output-dir", root / name, "--max-steps", "2", "--ckpt"]
        data = ["--data.type", "fake", "--data.batch-size", "2", "--data.seq-len", "16", "--optim.lr", "1e-2"]
        code, error = run_command("sft", [*arguments, *data, "--device", "cpu", *more])
        assert code == 0, error[-3000:]
    return root


def in_process(world, argument):
    """The export of a checkpoint joins a world of its own, so it runs where there is none."""
    checkpoint, target, dtype, *adapter = argument
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    try:
        export_policy(Path(checkpoint), Path(target), form=ExportForm(bool(adapter), dtype))
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def checkpoint_of(runs, name):
    return RunPaths(runs / name).checkpoint(2)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_export_equals_published_version(runs, name, tmp_path):
    run_world(1, in_process, (str(checkpoint_of(runs, name)), str(tmp_path / "out"), None), tmp_path)
    published = read_manifest(RunPaths(runs / name).weights(2), WEIGHTS_FORMAT)
    assert hash_tensors(tmp_path / "out") == published["tensors"]
    card = (tmp_path / "out/README.md").read_text()
    assert "2 steps of supervised fine-tuning" in card and f"`torch of the trainer` | `{version('torch')}`" in card
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_export_of_other_dtype_and_adapters(runs, tmp_path):
    run_world(1, in_process, (str(checkpoint_of(runs, "full")), str(tmp_path / "half"), "bfloat16"), tmp_path)
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    run_world(1, in_process, (str(checkpoint_of(runs, "lora")), str(tmp_path / "peft"), "float32", True), tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "peft" / "adapter_model.safetensors"))


def test_export_of_invalid_checkpoint_raises(runs, tmp_path):
    good = checkpoint_of(runs, "full")
    with pytest.raises(ConfigError, match="exists already"):
        export_policy(good, tmp_path)
    with pytest.raises(ConfigError, match="step_3 is no directory; pass a run directory"):
        export_policy(tmp_path / "step_3", tmp_path / "out")
    with pytest.raises(ConfigError, match="--adapter"):
        export_policy(good, tmp_path / "out", form=ExportForm(adapter=True))
    with pytest.raises(ConfigError, match="--dtype"):
        export_policy(RunPaths(runs / "full").weights(2), tmp_path / "out", form=ExportForm(dtype="float16"))
    shard = next((good / "trainer").glob("*.distcp"))
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RunError, match="damaged"):
            export_policy(good, tmp_path / "out")
    finally:
        shard.write_bytes(content)
    (good / COMMITTED).rename(good / "gone")
    try:
        with pytest.raises(ConfigError, match="not finished"):
            export_policy(good, tmp_path / "out")
    finally:
        (good / "gone").rename(good / COMMITTED)


def test_export_ignores_compute_settings(runs, tmp_path):
    """A run on many GPUs is exported by one process on a CPU, which could not compute as it did."""
    manifest = read_manifest(checkpoint_of(runs, "full") / "trainer", "prime_rl.checkpoint/1")
    model = manifest["config"]["model"]
    elsewhere = {"impl": "liger_kernel", "reshard_ranks": 4, "tp": 4, "ep": 2, "cp": {"degree": 2}, "dp_replicate": 2}
    manifest["config"]["model"] = {**model, **elsewhere, "fsdp_cpu_offload": True, "a_key_of_later": 1}
    lengths = {"seq_len": 1, "max_model_len": 1}
    assert model_config(manifest, None, adapter=False) == TrainerModelConfig(name=model["name"], **lengths)
    manifest["config"]["model"] |= {"name": "a/b", "revision": "c"}
    assert model_config(manifest, None, adapter=False) == TrainerModelConfig(name="a/b", revision="c", **lengths)
    assert model_config(manifest, "moved", adapter=False) == TrainerModelConfig(name="moved", **lengths)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_export_of_a_model_whose_frequencies_depend_on_lengths_needs_none(kind, tmp_path):
    """A run of short sequences: the defaults of `model.seq_len` and `max_model_len` would be refused."""
    keys = {**SMALL, "hidden_size": 4 * HEAD_DIM, "max_position_embeddings": LONGEST}
    save(LlamaConfig(**keys, rope_parameters=dict(ROPES[kind])), tmp_path)
    settings = TrainerModelConfig(name=str(tmp_path)).model_dump()
    with pytest.raises(ConfigError, match=r"^model\.max_model_len"):
        build_policy(TrainerModelConfig(name=str(tmp_path)))
    build_policy(model_config({"config": {"model": settings}, "device": "cpu"}, None, adapter=False))


# The pickle of checkpoint metadata: readable from every supported Python, and nothing else is called


class PicklerOfPython3112(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do (3.11.2 is Debian 12's)."""

    def reducer_override(self, value):
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (type(value), value.name)
        return NotImplemented


def written(folder, value, pickler=pickle.Pickler):
    content = io.BytesIO()
    pickler(content).dump(value)
    (folder / ".metadata").write_bytes(content.getvalue())
    return TensorReader(folder)


@pytest.mark.parametrize("pickler", [pickle.Pickler, PicklerOfPython3112])
def test_read_metadata_of_every_supported_python_is_equal(tmp_path, pickler):
    properties = TensorProperties(dtype=torch.bfloat16)
    reader = written(tmp_path, Metadata(state_dict_metadata={"w": properties}, storage_meta=StorageMeta()), pickler)
    assert reader.read_metadata().state_dict_metadata["w"] == properties


class Getattr:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


@pytest.mark.parametrize("arguments", [(torch.Size, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (Metadata, "x")])
def test_read_metadata_that_reads_other_attributes_is_refused(tmp_path, arguments):
    with pytest.raises(RunError, match="which checkpoint metadata does not use"):
        written(tmp_path, Getattr(*arguments)).read_metadata()


# Settings that change a resumed run, the timeout of a save, and the wait for the other part of a checkpoint


KL = {"loss": {"type": "grpo", "kl": {"coef": 0.1}}}


def dump(**keys):
    return TrainerConfig(**keys).model_dump(mode="json")


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({}, {}, []),
        ({"loss": {"type": "grpo"}}, KL, ["loss.kl was None when the checkpoint was written and is set"]),
        (KL, {"loss": {"type": "grpo"}}, ["loss.kl was set when the checkpoint was written and is None"]),
        ({}, {"model": {"lora": {}}}, ["model.lora was None when the checkpoint was written and is set"]),
        ({}, {"seed": 7}, ["seed was 42 when the checkpoint was written and is 7"]),
        ({}, {"tokenizer": {"name": "t"}}, ["tokenizer.name was None when the checkpoint was written and is 't'"]),
        ({"max_steps": 3}, {"max_steps": 9}, []),
        ({}, {"model": {"ac": {}, "compile": {}, "tp": 2}, "wandb": {}, "ckpt": {}}, []),
    ],
)
def test_changed_settings_include_blocks_that_were_none(before, now, lines):
    assert changed_settings(dump(**before), dump(**now)) == lines


def test_changed_settings_ignore_unknown_keys():
    older = dump()
    del older["optim"]["weight_decay"]
    assert changed_settings(older, dump(optim={"type": "adamw", "weight_decay": 0.5})) == []


class Data:
    """A stream whose position is a number."""

    def __init__(self, position=0):
        self.position = position

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


def restore(world, model, root, optim=None, data=None, **ckpt):
    """Resume as a new process does; return its parts, with the progress."""
    data_keys = {"type": "fake", "seq_len": 16}
    config = SFTConfig(
        model={"name": str(model)}, optim=optim or {"type": "adamw"}, data=data_keys, max_steps=9, output_dir=root,
        device="cpu", ckpt={"interval": 1, **ckpt},
    )  # fmt: skip
    checkpoints, policy = Checkpointer(config, RunPaths(root), world), make_policy(config.model, 0, world)
    optimizer, data = build_optimizer(config.optim, policy), data or Data()
    return checkpoints, policy, optimizer, data, checkpoints.restore(policy, optimizer, data)


def save_two_steps(world, model, root):
    """Save checkpoint 2 with moments, five tokens and position 7."""
    checkpoints, policy, optimizer, _, progress = restore(world, model, root, data=Data(7))
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    progress.step, progress.tokens = 2, 5
    checkpoints.step_done(progress, last=True)
    return checkpoints, policy


@pytest.mark.extended
def test_skipped_parts_are_not_restored(tmp_path, world, monkeypatch):
    """The weights always are; a later resume keeps the schedule, and a restart skips nothing of its own checkpoints."""
    make_tiny_model(tmp_path / "model")
    root = tmp_path / "run"
    _, saved = save_two_steps(world, tmp_path / "model", root)
    expected = [parameter.full_tensor().clone() for parameter in saved.parameters()]

    def resume(**keys):
        checkpoints, policy, optimizer, data, progress = restore(world, tmp_path / "model", root, **keys)
        weights = [parameter.full_tensor() for parameter in policy.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(expected, weights, strict=True))
        found = bool(optimizer.state), checkpoints.schedule_start, progress.step, progress.tokens, data.position
        return checkpoints, progress, found

    assert resume(resume_step=2)[2] == (True, 0, 2, 5, 7)
    assert resume(resume_step=2, skip_optimizer=True)[2] == (False, 0, 2, 5, 7)
    assert resume(resume_step=2, skip_progress=True)[2] == (True, 0, 2, 0, 7)
    assert resume(resume_step=2, skip_dataloader=True)[2] == (True, 0, 2, 5, 0)
    assert resume(resume_step=2, skip_optimizer=True, optim={"type": "sgd"})[2] == (False, 0, 2, 5, 7)
    with pytest.raises(ConfigError, match=r"optim.type = sgd, .* --ckpt.skip-optimizer"):
        resume(resume_step=2, optim={"type": "sgd"})
    monkeypatch.setenv(START_VARIABLE, "ours")
    checkpoints, progress, found = resume(resume_step=2, skip_scheduler=True)
    assert found == (True, 2, 2, 5, 7)
    progress.step, progress.tokens = 3, 6
    checkpoints.step_done(progress, last=True)
    everything = dict.fromkeys(SKIPPED, True)
    assert resume(resume_step=-1)[2] == (True, 2, 3, 6, 7), "the schedule continues"
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    assert resume(resume_step=2, **everything)[2] == (True, 2, 3, 6, 7)
    monkeypatch.setenv(START_VARIABLE, "another")
    monkeypatch.setenv(RESTART_VARIABLE, "0")
    assert resume(resume_step=3, **everything)[2] == (False, 3, 3, 0, 0)


def test_generators_continue_where_they_were(world):
    def draw():
        return random.random(), np.random.random(), np.random.standard_normal(), torch.rand(()).item()

    seed_rng(world, 1)
    draw()  # numpy keeps a second normal number
    saved = rng_tensors(world)
    expected = draw()
    seed_rng(world, 2)
    restore_rng(world, saved)
    assert draw() == expected


def test_close_with_hanging_disk_raises_at_deadline(tmp_path):
    saver = Checkpointer.__new__(Checkpointer)
    stuck = threading.Event()
    saver._options, saver._directory = CkptConfig(timeout_seconds=0.2), tmp_path
    saver._pending = start_daemon_future(stuck.wait, "checkpoint", exit_wait_seconds=0.2)
    with pytest.raises(
        DeadlineError, match=r"waited 0 s for a checkpoint to be written to .*\(ckpt\.timeout_seconds\)"
    ):
        saver.close()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-end":  # this alone would keep the process from its end
            thread.join(60)
            assert not thread.is_alive()
    stuck.set()
    saver._pending.result(60)
    saver.close()


@pytest.mark.parametrize("trace", ["ledger/branch_0.jsonl", "heartbeats/orchestrator.json", None])
def test_save_at_stop_waits_for_the_part_of_an_orchestrator_that_has_run(tmp_path, monkeypatch, trace):
    """Its ledger may be on another machine: a relay copies the heartbeat only."""
    saver = Checkpointer.__new__(Checkpointer)
    saver._options, saver._paths, saver._saved, saver._pending = CkptConfig(), RunPaths(tmp_path), 0, None
    saver._publishes_versions, saver._waits_for_orchestrator = True, False
    saver.stop_request = SimpleNamespace(is_agreed=True)
    if trace is not None:
        (tmp_path / trace).parent.mkdir()
        (tmp_path / trace).touch()
    waits = []
    monkeypatch.setattr(saver, "_start_save", lambda progress: waits.append(saver._waits_for_orchestrator))
    saver.save_at_stop(Progress(5))
    assert waits == [trace is not None]
