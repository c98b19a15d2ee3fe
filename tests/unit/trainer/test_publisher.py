"""A published version can be loaded by transformers; an error on rank 0 raises on every rank."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync import transport as files
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.unit.trainer.test_policy_model import ARCHITECTURES, save
from tests.unit.trainer.world import run_world


def make_publisher(world, path, tokenizer_path, dtype=torch.float32, **options):
    config = TrainerModelConfig(name=str(path))
    policy = shard_policy(load_policy(config, seed=0), config, world)
    tokenizer = load_tokenizer(TokenizerConfig(name=str(tokenizer_path)), config)
    return Publisher(policy, tokenizer, dtype, world, **options)


@pytest.mark.extended(after=6)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_publish_reload_gives_the_same_model(name, world, tmp_path, tiny):
    reference = save(ARCHITECTURES[name](), tmp_path / "base")
    target = tmp_path / "weights" / "step_1"
    make_publisher(world, tmp_path / "base", tiny).publish(target, PolicyVersion(0, 1))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True, attn_implementation=reference.config._attn_implementation
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, reference(tokens).logits)
    # The names are those of the checkpoint that was loaded, which is what an inference engine expects.
    assert hash_tensors(target) == hash_tensors(tmp_path / "base")


@pytest.fixture
def publish(world, tmp_path, tiny):
    """Publish the tiny model once more; return the directory of the version."""

    def publish(*dtype, **options):
        target = tmp_path / "weights" / "step_7"
        make_publisher(world, tiny, tiny, *dtype, **options).publish(target, PolicyVersion(2, 7))
        return target

    return publish


def test_publish_writes_manifest_and_companions(publish, tiny):
    target = publish()
    manifest = read_manifest(target, WEIGHTS_FORMAT)
    assert (manifest["branch"], manifest["step"]) == (2, 7)
    assert manifest["tensors"] == hash_tensors(target)
    assert manifest["hash"] == content_hash(manifest["tensors"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template
    assert tokenizer("ab")["input_ids"] == transformers.AutoTokenizer.from_pretrained(tiny)("ab")["input_ids"]
    assert [path.name for path in target.parent.iterdir()] == ["step_7"]
    with pytest.raises(RunError, match="exists already"):
        publish()


def test_publish_dtype_is_in_files_and_config(publish):
    target = publish(torch.bfloat16)
    with safe_open(target / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in hash_tensors(target)} == {"BF16"}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_publish_large_model_writes_shards_and_index(publish, tiny):
    target = publish(shard_bytes=60_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 1 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert hash_tensors(target) == hash_tensors(tiny)
    transformers.AutoModelForCausalLM.from_pretrained(target)


def fail_to_publish(world: World, argument: list[str]):
    """Runs on every rank: the first publication fails before, the second amid the gathers, the third works."""
    root, tiny = map(Path, argument)
    publisher = make_publisher(world, tiny, tiny, shard_bytes=60_000)
    messages = []

    def attempt(target):
        try:
            publisher.publish(target, PolicyVersion(0, 1))
        except RunError as error:
            messages.append(str(error))

    (root / "exists").mkdir(exist_ok=True)
    attempt(root / "exists")
    write = files.write_safetensors
    if world.is_main:
        files.write_safetensors = _full_disk
    attempt(root / "full" / "step_1")
    files.write_safetensors = write
    attempt(root / "fine" / "step_1")
    return messages


def _full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def test_publish_error_on_rank_0_raises_on_all_ranks(tmp_path, tiny):
    leader, other = run_world(2, fail_to_publish, [str(tmp_path), str(tiny)], tmp_path, timeout=100)
    assert "exists already" in leader[0] and "No space left on device" in leader[1]
    assert leader == other and len(leader) == 2
    assert hash_tensors(tmp_path / "fine" / "step_1") == hash_tensors(tiny)
    assert not (tmp_path / "full" / "step_1").exists()
