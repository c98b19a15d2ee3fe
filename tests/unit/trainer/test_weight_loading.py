"""Each rank loads its part of the weights of transformers; errors contain the invalid file or tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoConfig

from prime_rl.configs.training.model import DebugModelConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.trainer.model.policy_model import build_policy
from prime_rl.trainer.parallel.device_mesh import fill_tensor, local_ranges
from prime_rl.trainer.weights.policy_loading import init_buffers, load_policy, make_policy, materialize
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES, save
from tests.unit.trainer.world import run_world

SEED = 5


SHARDED = ("qwen2_tied", "gemma3_window", "phi_biased_head", "qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One of each architecture; the odd ones in bfloat16 and in several files."""
    root = tmp_path_factory.mktemp("models")
    for i, (name, make) in enumerate(ARCHITECTURES.items()):
        if i % 2:
            torch.manual_seed(i)
            model = transformers.AutoModelForCausalLM.from_config(make(), dtype=torch.bfloat16)
            model.save_pretrained(root / name, max_shard_size="10KB")
        else:
            save(make(), root / name)
    return root


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_and_buffers_equal_those_of_transformers(name, models):
    loaded = load_policy(TrainerModelConfig(name=str(models / name)), 0).causal_lm
    reference = transformers.AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
    assert list(differences(loaded, reference)) == []
    # Publishing undoes what loading has done.
    assert list(map(repr, loaded._weight_conversions)) == list(map(repr, reference._weight_conversions))


def load_all(world, argument):
    """Runs on every rank: load, gather and compare with transformers; return what differs, sums, and the refusal."""
    differs, random = [], {}
    for name in SHARDED:
        path = Path(argument) / name
        policy = make_policy(TrainerModelConfig(name=str(path)), 0, world)
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        differs += [f"{name}: {what}" for what in differences(policy.causal_lm, reference)]
        drawn = make_policy(random_weights(path), SEED, world)
        random[name] = {key: value.full_tensor().double().sum().item() for key, value in drawn.named_parameters()}
    try:
        make_policy(TrainerModelConfig(name=str(path) if world.rank else "/no/such/model"), 0, world)
    except (ConfigError, RunError) as error:
        return {"differs": differs, "random": random, "refusal": str(error)}


def random_weights(path):
    return TrainerModelConfig(name=str(path), debug=DebugModelConfig(random_init=True))


def differences(loaded, reference):
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (loaded, reference))
    assert ours.keys() == theirs.keys()
    for name in ours:
        whole = ours[name].full_tensor() if isinstance(ours[name], DTensor) else ours[name]
        if whole.dtype != torch.float32 or not torch.equal(whole, theirs[name]):
            yield name
    if len(set(map(id, ours.values()))) != len(set(map(id, theirs.values()))):
        yield "what is tied"
    our_buffers, their_buffers = dict(loaded.named_buffers()), dict(reference.named_buffers())
    assert our_buffers.keys() == their_buffers.keys()
    yield from (name for name in our_buffers if not torch.equal(our_buffers[name], their_buffers[name]))


@pytest.mark.extended
def test_weights_of_two_ranks_equal_those_of_transformers(models, tmp_path):
    loaded = run_world(2, load_all, str(models), tmp_path)
    assert [answer["differs"] for answer in loaded] == [[], []]
    lacks, has = (answer["refusal"] for answer in loaded)
    assert "does not exist" in lacks and "another rank" in has, "a model that one node lacks (I7)"
    for name in SHARDED:
        drawn = load_policy(random_weights(models / name), SEED).named_parameters()
        alone = {key: value.double().sum().item() for key, value in drawn}
        assert loaded[0]["random"][name] == loaded[1]["random"][name] == alone, "of no world size"


def place_all(world, _):
    """Runs on 4 ranks: fill every layout from one tensor; return what came out otherwise."""
    wrong = []
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    for shape in [(8, 6), (5, 7), (2, 3), (12,), (4, 6, 5)]:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        layouts = [(line, [Shard(0)]), (line, [Replicate()]), (plane, [Replicate(), Shard(0)])]
        layouts += [(plane, [Shard(0), Shard(len(shape) - 1)]), (plane, [Shard(0), Shard(0)])]
        layouts += [(plane, [Shard(-1), Replicate()])]
        for mesh, placements in layouts:
            expected = distribute_tensor(whole, mesh, placements)
            target = distribute_tensor(torch.zeros(shape), mesh, placements)
            fill_tensor(target, whole)
            if not torch.equal(target.to_local(), expected.to_local()):
                wrong.append(f"{shape} {placements} {local_ranges(target)}")
    # What tensor parallelism has split is split once more by FSDP, in the other order.
    whole = torch.arange(48.0).view(8, 6)
    for dim in (0, 1):
        layer = torch.nn.Linear(6, 8, bias=False)
        layer.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 6), plane["b"], [Shard(dim)]))
        fully_shard(torch.nn.Sequential(layer), mesh=plane["a"])
        fill_tensor(layer.weight, whole)
        if not torch.equal(layer.weight.full_tensor(), whole):
            wrong.append(f"FSDP over Shard({dim}): {layer.weight.placements}")
    return wrong


def test_local_ranges_match_the_local_tensor_in_every_layout(tmp_path):
    assert run_world(4, place_all, None, tmp_path) == [[]] * 4


@pytest.fixture
def tiny(tmp_path):
    return make_tiny_model(tmp_path / "tiny")


def change(path, edit):
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})


def refusal(path, **options):
    with pytest.raises(ConfigError) as caught:
        load_policy(TrainerModelConfig(name=str(path), **options), seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NORM = "model.layers.1.input_layernorm.weight"


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def write_index(content):
    return lambda path: (path / "model.safetensors.index.json").write_text(content)


def add_other_shards(path):
    """transformers would load the file; the index names the shards."""
    shutil.copy(path / "model.safetensors", path / "model-00001-of-00001.safetensors")
    write_index(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))(path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: change(path, lambda tensors: tensors.pop(NORM)), [NORM, "model.safetensors lacks"]),
        (
            lambda path: change(path, lambda tensors: tensors.update({"model.layers.7.more.weight": torch.zeros(2)})),
            ["model.safetensors contains model.layers.7.more.weight"],
        ),
        (
            lambda path: change(path, lambda tensors: tensors.update({NORM: torch.zeros(3)})),
            [NORM, "[3]", "[64]", "model.safetensors"],
        ),
        (lambda path: cut(path / "model.safetensors"), ["model.safetensors cannot be read"]),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            ["neither model.safetensors", "save_pretrained"],
        ),
        (write_index("[]"), ["model.safetensors.index.json is not a valid index of weight files"]),
        (write_index('{"weight_map": []}'), ["model.safetensors.index.json is not a valid index of weight files"]),
        (write_index("{"), ["model.safetensors.index.json is not a valid index of weight files"]),
        (add_other_shards, ["has two models, model.safetensors and the shards that"]),
    ],
    ids=["missing", "unexpected", "shape", "cut", "pickle", "list", "no map", "no JSON", "two models"],
)
def test_unusable_weights_are_named_in_the_error(tiny, spoil, words):
    spoil(tiny)
    message = refusal(tiny)
    assert all(word in message for word in words)


def test_wrong_shape_of_experts_is_in_the_error(models, tmp_path):
    path = shutil.copytree(models / "mixtral", tmp_path / "moe")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    assert "experts" in refusal(path)


def test_missing_file_of_the_index_is_in_the_error(models, tmp_path):
    several = next(path.parent for path in sorted(models.glob("*/model.safetensors.index.json")))
    path = shutil.copytree(several, tmp_path / "several")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refusal(path)


def test_tied_head_in_the_files_must_equal_the_embedding(tiny):
    embedding = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    change(tiny, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    assert policy.causal_lm.lm_head.weight is policy.causal_lm.model.embed_tokens.weight
    change(tiny, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    assert "tie_word_embeddings" in refusal(tiny)
    change(tiny, lambda tensors: tensors.pop("model.embed_tokens.weight"))  # only under the name of the head
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    assert torch.equal(policy.causal_lm.model.embed_tokens.weight, embedding + 1)


def test_num_layers_loads_the_first_layers(tiny):
    (tiny / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2, 7]}))
    whole = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    first = load_policy(TrainerModelConfig(name=str(tiny), debug=DebugModelConfig(num_layers=1)), seed=0)
    ours, theirs = dict(first.named_parameters()), dict(whole.named_parameters())
    assert 0 < len(ours) < len(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    generation = whole.causal_lm.generation_config
    assert (generation.temperature, generation.eos_token_id) == (0.6, [2, 7])


def test_config_of_the_first_layers_has_only_their_settings(tmp_path):
    save(ARCHITECTURES["gemma4_heads_of_two_sizes"](), tmp_path)
    first = build_policy(TrainerModelConfig(name=str(tmp_path), debug=DebugModelConfig(num_layers=2)))
    first.causal_lm.config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert [layer.head_dim for layer in config.per_layer_config] == [16, 32]


def test_buffer_that_is_not_initialised_is_refused():
    """Otherwise the buffer would contain uninitialised memory."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(ARCHITECTURES["llama"]())
        model.model.register_buffer("lost", torch.arange(3.0), persistent=False)
    materialize(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"buffer model\.lost"):
        init_buffers(model, set(), torch.device("cpu"))
