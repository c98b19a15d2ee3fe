"""An exported checkpoint equals the published version, and loads in transformers and peft."""

import io
import os
import pickle
import random
import shutil
import threading
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta, TensorProperties
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.configs.checkpoint import SKIPPED, CkptConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.entrypoints.delivery.policy_export import ExportForm, export_policy, model_config
from prime_rl.liveness import heartbeat_writer
from prime_rl.storage import checkpoint_artifacts
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.batch import Progress
from prime_rl.storage.checkpoint_artifacts import COMMITTED, find_checkpoints
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import RESTART_VARIABLE, START_VARIABLE
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.storage.wait_for import DeadlineError, start_daemon_future
from prime_rl.trainer import process_setup
from prime_rl.trainer.checkpoints import trainer_state
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer, changed_settings, check_settings
from prime_rl.trainer.checkpoints.trainer_state import TensorReader, restore_rng, rng_tensors, seed_rng
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_command

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


@pytest.fixture
def export(monkeypatch):
    """Export in this process, which keeps its settings."""
    monkeypatch.setattr(process_setup, "limit_process", lambda: None)
    monkeypatch.setattr("prime_rl.entrypoints.delivery.policy_export.set_up_logging", lambda *_: None)
    return lambda checkpoint, target, **form: export_policy(checkpoint, target, form=ExportForm(**form))


def checkpoint_of(runs, name):
    return RunPaths(runs / name).checkpoint(2)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_export_equals_published_version(runs, name, export, tmp_path):
    export(checkpoint_of(runs, name), tmp_path / "out")
    published = read_manifest(RunPaths(runs / name).weights(2), WEIGHTS_FORMAT)
    assert hash_tensors(tmp_path / "out") == published["tensors"]
    card = (tmp_path / "out/README.md").read_text()
    assert "2 steps of supervised fine-tuning" in card and f"`torch of the trainer` | `{version('torch')}`" in card
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_export_of_other_dtype_and_adapters(runs, export, tmp_path):
    export(checkpoint_of(runs, "full"), tmp_path / "half", dtype="bfloat16")
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    export(checkpoint_of(runs, "lora"), tmp_path / "peft", dtype="float32", adapter=True)
    assert all("lora_" in name for name in load_file(tmp_path / "peft" / "adapter_model.safetensors"))


def test_export_of_invalid_checkpoint_raises(runs, export, tmp_path):
    good = checkpoint_of(runs, "full")
    with pytest.raises(ConfigError, match="--adapter"):
        export(good, tmp_path / "out", adapter=True)
    bad = tmp_path / "step_2"
    shutil.copytree(good, bad)
    shard = next((bad / "trainer").glob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match="damaged"):
        export(bad, tmp_path / "out")
    (bad / COMMITTED).unlink()
    with pytest.raises(ConfigError, match="not finished"):
        export(bad, tmp_path / "out")


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


# The pickle of checkpoint metadata: readable from every supported Python, and nothing else is called


class PicklerOfPython3112(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do (3.11.2 is Debian 12's)."""

    def reducer_override(self, value):
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (type(value), value.name)
        return NotImplemented


def read_metadata(folder, value, pickler=pickle.Pickler):
    content = io.BytesIO()
    pickler(content).dump(value)
    (folder / ".metadata").write_bytes(content.getvalue())
    return TensorReader(folder).read_metadata()


@pytest.mark.parametrize("pickler", [pickle.Pickler, PicklerOfPython3112])
def test_read_metadata_of_every_supported_python_is_equal(tmp_path, pickler):
    properties = TensorProperties(dtype=torch.bfloat16)
    metadata = Metadata(state_dict_metadata={"w": properties}, storage_meta=StorageMeta())
    assert read_metadata(tmp_path, metadata, pickler).state_dict_metadata["w"] == properties


class Call:
    """Is read by a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [(os.system, "true"), (getattr, torch.Size, "__class__"), (getattr, _MEM_FORMAT_ENCODING, "mro")],
)
def test_read_metadata_that_calls_other_functions_is_refused(tmp_path, call):
    with pytest.raises(RunError, match="which checkpoint metadata does not use"):
        read_metadata(tmp_path, Call(*call))


# Settings that change a resumed run, the timeout of a save, and the wait for the other part of a checkpoint


KL = {"loss": {"type": "grpo", "kl": {"coef": 0.1}}}


def dump(**keys):
    return TrainerConfig(**keys).model_dump(mode="json")


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (KL, {"loss": {"type": "grpo"}}, ["loss.kl was set when the checkpoint was written and is None"]),
        ({}, {"model": {"lora": {}}}, ["model.lora was None when the checkpoint was written and is set"]),
        ({}, {"seed": 7}, ["seed was 42 when the checkpoint was written and is 7"]),
        ({"max_steps": 3}, {"max_steps": 9, "model": {"ac": {}, "compile": {}, "tp": 2}, "wandb": {}, "ckpt": {}}, []),
    ],
)
def test_changed_settings_include_blocks_that_were_none(before, now, lines):
    assert changed_settings(dump(**before), dump(**now)) == lines


def test_settings_of_another_version_or_command():
    older = dump()
    del older["optim"]["weight_decay"]
    assert changed_settings(older, dump(optim={"type": "adamw", "weight_decay": 0.5})) == []
    with pytest.raises(ConfigError, match="was written by trainer, not by sft"):
        check_settings("trainer", older, "sft", older)


class Data:
    """A stream whose position is a number."""

    def __init__(self, position=0):
        self.position = position

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


def restore(world, model, root, keys={}, data=None, **ckpt):  # noqa: B006
    """Start or resume as a new process does; return its parts, with the progress."""
    settings = {"optim": {"type": "adamw"}, "model": {}, **keys}
    settings["model"] = {"name": str(model), **settings["model"]}
    more = {"data": {"type": "fake", "seq_len": 16}, "max_steps": 9, "device": "cpu"}
    config = SFTConfig(**settings, **more, output_dir=root, ckpt={"interval": 1, **ckpt})
    checkpoints, policy = Checkpointer(config, RunPaths(root), world), make_policy(config.model, 0, world)
    optimizer, data = build_optimizer(config.optim, policy), data or Data()
    return checkpoints, policy, optimizer, data, checkpoints.restore(policy, optimizer, data)


def weights_of(policy):
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in policy.parameters()])


def test_skipped_parts_are_not_restored(tiny, tmp_path, world, monkeypatch, said):
    """The weights always are; a later resume keeps the schedule, and a restart skips nothing of its own checkpoints."""
    monkeypatch.setattr(heartbeat_writer, "TAKEOVER_SECONDS", 0)
    checkpoints, policy, optimizer, _, progress = restore(world, tiny, tmp_path, data=Data(7))
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.rand(1)  # the generators move on
    progress.step, progress.tokens = 2, 5
    checkpoints.step_done(progress, last=True)
    expected, drawn = weights_of(policy), torch.rand(3)

    def resume(keys={}, **ckpt):  # noqa: B006
        checkpoints, policy, optimizer, data, progress = restore(world, tiny, tmp_path, keys, **ckpt)
        assert torch.equal(weights_of(policy), expected)
        found = bool(optimizer.state), checkpoints.schedule_start, progress.step, progress.tokens, data.position
        return checkpoints, progress, found

    assert resume({"optim": {"type": "adamw", "beta1": 0.5}}, resume_step=2)[2] == (True, 0, 2, 5, 7)
    assert torch.equal(torch.rand(3), drawn)
    assert any("optim.beta1 was 0.9 when the checkpoint was written and is 0.5" in line for line in said())
    assert resume(resume_step=2, skip_progress=True)[2] == (True, 0, 2, 0, 7)
    assert resume(resume_step=2, skip_dataloader=True)[2] == (True, 0, 2, 5, 0)
    assert resume({"optim": {"type": "sgd"}}, resume_step=2, skip_optimizer=True)[2] == (False, 0, 2, 5, 7)
    with pytest.raises(ConfigError, match=r"optim.type = sgd, .* --ckpt.skip-optimizer"):
        resume({"optim": {"type": "sgd"}}, resume_step=2)
    with pytest.raises(ConfigError, match=r"model\.layers\.1.*model\.debug\.num_layers was None"):
        resume({"model": {"debug": {"num_layers": 1}}}, resume_step=2)
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


@pytest.mark.parametrize(
    ("point", "complete"),
    [("hash_file", [1]), ("seal_part", [1]), ("commit_checkpoint", [1]), ("remove_old_checkpoints", [1, 2])],
)
def test_kill_during_save_keeps_earlier_checkpoints(point, complete, tiny, tmp_path, world, monkeypatch):
    class Killed(BaseException):
        """Nothing is cleaned up, as after SIGKILL."""

    def die(*_, **__):
        raise Killed

    checkpoints, *_, progress = restore(world, tiny, tmp_path)
    progress.step = 1
    checkpoints.step_done(progress, last=False)
    progress.step = 2
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint_artifacts, point, die)
        checkpoints.step_done(progress, last=False)
    directory = RunPaths(tmp_path).checkpoints_dir
    assert find_checkpoints(directory).steps == complete
    checkpoints, *_, progress = restore(world, tiny, tmp_path, resume_step=-1)
    assert progress.step == complete[-1]
    for step in range(progress.step + 1, 4):
        progress.step = step
        checkpoints.step_done(progress, last=False)
    assert find_checkpoints(directory).steps == [1, 2, 3]
    assert [path for path in directory.rglob(".*") if path.name != ".metadata"] == []


def test_background_save_contains_its_step(tiny, tmp_path, world, monkeypatch):
    """Training continues while the copies are written."""
    checkpoints, policy, *_, progress = restore(world, tiny, tmp_path, save_async=True)
    expected, gate, save = weights_of(policy), threading.Event(), checkpoints._save
    monkeypatch.setattr(checkpoints, "_save", lambda *arguments: (gate.wait(60), save(*arguments)))
    progress.step = 1
    checkpoints.step_done(progress, last=False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    gate.set()
    checkpoints.close()
    _, policy, *_ = restore(world, tiny, tmp_path, resume_step=1)
    assert torch.equal(weights_of(policy), expected)


def test_saves_are_planned_once_until_the_state_changes(tiny, tmp_path, world, monkeypatch):
    plans, create = [], DefaultSavePlanner._create_global_plan
    monkeypatch.setattr(DefaultSavePlanner, "_create_global_plan", lambda *given: plans.append(1) or create(*given))
    first, policy, optimizer, _, progress = restore(world, tiny, tmp_path / "first")
    other, *_ = restore(world, tiny, tmp_path / "other", {"model": {"lora": {"rank": 2}}})
    for step, num_plans in ((1, 2), (2, 2), (3, 3)):  # both plan their first save, and `first` the moments of AdamW
        if step == 3:
            for parameter in policy.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        progress.step = step
        for checkpoints in (first, other):
            checkpoints.step_done(progress, last=False)
        assert len(plans) == num_plans
    for checkpoints in (first, other):
        checkpoints.close()
        assert checkpoints._cache_key not in DefaultSavePlanner._cached_all_plans, "of runs that ended"
    reads, load = [], trainer_state._Unpickler.load
    monkeypatch.setattr(trainer_state._Unpickler, "load", lambda unpickler: reads.append(1) or load(unpickler))
    for step in (3, 2):
        _, resumed, *_ = restore(world, tiny, tmp_path / "first", resume_step=step)
        assert torch.equal(weights_of(resumed), weights_of(policy)) == (step == 3)
    assert len(reads) == 2, "a restore reads the metadata once"


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
    saver._options, saver._directory, saver._cache_key = CkptConfig(timeout_seconds=0.1), tmp_path, ""
    saver._pending = start_daemon_future(stuck.wait, "checkpoint", exit_wait_seconds=0.1)
    with pytest.raises(DeadlineError, match=r"checkpoint to be written to .*\(ckpt\.timeout_seconds\)"):
        saver.close()
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
