"""An exported checkpoint equals the published version, and loads in transformers and peft."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.checkpoint_artifacts import COMMITTED
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.export import export, model_config
from prime_rl.trainer.model.policy_model import build_policy
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
    """`export` joins a world of its own, so it runs where there is none."""
    torch.distributed.destroy_process_group()
    checkpoint, target, *more = argument
    try:
        _without_ranks(checkpoint, target, *more)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _without_ranks(checkpoint, target, dtype, adapter=False):
    import os
    from pathlib import Path

    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    export(Path(checkpoint), Path(target), dtype, adapter=adapter)


def checkpoint_of(runs, name):
    return RunPaths(runs / name).checkpoint(2)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_export_equals_published_version(runs, name, tmp_path):
    run_world(1, in_process, (str(checkpoint_of(runs, name)), str(tmp_path / "out"), "float32"), tmp_path)
    published = read_manifest(RunPaths(runs / name).weights(2), WEIGHTS_FORMAT)
    assert read_manifest(tmp_path / "out", WEIGHTS_FORMAT)["tensors"] == published["tensors"]
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
        export(good, tmp_path, "float32")
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        export(tmp_path / "step_3", tmp_path / "out", "float32")
    manifest = read_manifest(good / "trainer", "prime_rl.checkpoint/1")
    with pytest.raises(ConfigError, match="--adapter"):
        model_config(manifest, None, adapter=True)
    shard = next((good / "trainer").glob("*.distcp"))
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RunError, match="damaged"):
            export(good, tmp_path / "out", "float32")
    finally:
        shard.write_bytes(content)
    (good / COMMITTED).rename(good / "gone")
    try:
        with pytest.raises(ConfigError, match="not finished"):
            export(good, tmp_path / "out", "float32")
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


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_export_of_a_model_whose_frequencies_depend_on_lengths_needs_none(kind, tmp_path):
    """A run of short sequences: the defaults of `model.seq_len` and `max_model_len` would be refused."""
    keys = {**SMALL, "hidden_size": 4 * HEAD_DIM, "max_position_embeddings": LONGEST}
    save(LlamaConfig(**keys, rope_parameters=dict(ROPES[kind])), tmp_path)
    settings = TrainerModelConfig(name=str(tmp_path)).model_dump()
    with pytest.raises(ConfigError, match=r"^model\.max_model_len"):
        build_policy(TrainerModelConfig(name=str(tmp_path)))
    build_policy(model_config({"config": {"model": settings}, "device": "cpu"}, None, adapter=False))
