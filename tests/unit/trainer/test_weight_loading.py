"""Each rank loads its part of the weights of transformers; errors contain the invalid file or tensor."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from prime_rl.configs.training.model import DebugModelConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.parallel import dtensor_slices
from prime_rl.trainer.parallel.dtensor_slices import fill_tensor, local_ranges
from prime_rl.trainer.weights import hf_weights, model_download
from prime_rl.trainer.weights.initial_weights import init_buffers, materialize
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
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
    """Runs on every rank: load, gather and compare with transformers; return what differs and what was read."""
    read, differs, random = {}, [], {}
    cut, whole_of = dtensor_slices.read_ranges, hf_weights.HFWeights._whole
    for name in SHARDED:
        path = Path(argument) / name
        elements = []

        def noted(part, source, e=elements):
            if not isinstance(source, torch.Tensor):  # that is read already
                e.append(part)
            return part

        dtensor_slices.read_ranges = lambda source, runs, note=noted: note(cut(source, runs), source)
        hf_weights.HFWeights._whole = lambda reader, key, note=noted: note(whole_of(reader, key), key)
        policy = make_policy(TrainerModelConfig(name=str(path)), 0, world)
        dtensor_slices.read_ranges, hf_weights.HFWeights._whole = cut, whole_of
        whole = sum(parameter.numel() for parameter in policy.parameters())
        read[name] = sum(part.numel() for part in elements) / whole
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        differs += [f"{name}: {what}" for what in differences(policy.causal_lm, reference)]
        drawn = make_policy(random_weights(path), SEED, world)
        random[name] = {key: value.full_tensor().double().sum().item() for key, value in drawn.named_parameters()}
    return {"differs": differs, "read": read, "random": random}


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


@pytest.fixture(scope="module")
def loaded(models, tmp_path_factory):
    return run_world(2, load_all, str(models), tmp_path_factory.mktemp("scratch"))


def test_shards_equal_those_of_transformers(loaded):
    assert [answer["differs"] for answer in loaded] == [[], []]


def test_rank_reads_its_part_only(loaded):
    """Two ranks read the model once, but for what both need (buffers) and rows that do not divide."""
    for name in SHARDED:
        parts = [answer["read"][name] for answer in loaded]
        assert sum(parts) < 1.01 and max(parts) < 0.6


def test_random_weights_do_not_depend_on_the_world_size(loaded, models):
    for name in SHARDED:
        drawn = load_policy(random_weights(models / name), SEED).named_parameters()
        assert {key: value.double().sum().item() for key, value in drawn} == loaded[0]["random"][name]
        assert loaded[0]["random"][name] == loaded[1]["random"][name]


def place_all(world, _):
    """Runs on 4 ranks: fill every layout from one tensor; return what came out otherwise."""
    wrong = []
    for shape in [(8, 6), (5, 7), (2, 3), (12,), (4, 6, 5)]:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        line = init_device_mesh("cpu", (4,))
        last = len(shape) - 1
        layouts = [(line, [Shard(0)]), (line, [Replicate()]), (plane, [Replicate(), Shard(0)])]
        layouts += [(plane, [Shard(0), Shard(last)]), (plane, [Shard(0), Shard(0)]), (plane, [Shard(-1), Replicate()])]
        for mesh, placements in layouts:
            expected = distribute_tensor(whole, mesh, placements)
            target = distribute_tensor(torch.zeros(shape), mesh, placements)
            fill_tensor(target, whole)
            if not torch.equal(target.to_local(), expected.to_local()):
                wrong.append(f"{shape} {placements} {local_ranges(target)}")
    # What tensor parallelism has split is split once more by FSDP, in the other order.
    layer = torch.nn.Linear(6, 8, bias=False)
    whole = torch.arange(48.0).view(8, 6)
    for dim in (0, 1):
        split = distribute_tensor(torch.zeros(8, 6), plane["b"], [Shard(dim)])
        layer.weight = torch.nn.Parameter(split)
        block = fully_shard(torch.nn.Sequential(layer), mesh=plane["a"])
        fill_tensor(layer.weight, whole)
        assert isinstance(layer.weight, DTensor)
        if not torch.equal(layer.weight.full_tensor(), whole):
            wrong.append(f"FSDP over Shard({dim}): {layer.weight.placements}")
        layer = torch.nn.Linear(6, 8, bias=False)
        del block
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


def test_missing_tensor_is_in_the_error(tiny):
    change(tiny, lambda tensors: tensors.pop(NORM))
    assert NORM in refusal(tiny) and "model.safetensors lacks" in refusal(tiny)


def test_unexpected_tensor_is_in_the_error(tiny):
    change(tiny, lambda tensors: tensors.update({"model.layers.7.more.weight": torch.zeros(2)}))
    assert "model.safetensors contains model.layers.7.more.weight" in refusal(tiny)


def test_wrong_shape_is_in_the_error(tiny):
    change(tiny, lambda tensors: tensors.update({NORM: torch.zeros(3)}))
    message = refusal(tiny)
    assert NORM in message and "[3]" in message and "[64]" in message and "model.safetensors" in message


def test_wrong_shape_of_experts_is_in_the_error(models, tmp_path):
    path = shutil.copytree(models / "mixtral", tmp_path / "moe")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    assert "experts" in refusal(path)


def test_truncated_file_is_in_the_error(tiny):
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refusal(tiny)


def test_missing_file_of_the_index_is_in_the_error(models, tmp_path):
    several = next(path.parent for path in sorted(models.glob("*/model.safetensors.index.json")))
    path = shutil.copytree(several, tmp_path / "several")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refusal(path)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', "{"])
def test_invalid_index_is_in_the_error(tiny, content):
    (tiny / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json is not a valid index of weight files" in refusal(tiny)


def test_pickled_weights_are_refused(tiny):
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    assert "neither model.safetensors" in refusal(tiny) and "save_pretrained" in refusal(tiny)


def test_tied_head_in_the_files_must_equal_the_embedding(tiny):
    embedding = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    change(tiny, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    assert policy.causal_lm.lm_head.weight is policy.causal_lm.model.embed_tokens.weight
    change(tiny, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    assert "tie_word_embeddings" in refusal(tiny)


def test_tied_matrix_under_its_other_name_is_loaded(tiny):
    reference = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    change(tiny, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    for ours, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_num_layers_loads_the_first_layers(tiny):
    whole = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    first = load_policy(TrainerModelConfig(name=str(tiny), debug=DebugModelConfig(num_layers=1)), seed=0)
    ours, theirs = dict(first.named_parameters()), dict(whole.named_parameters())
    assert 0 < len(ours) < len(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_buffer_that_is_not_initialised_is_refused():
    """Otherwise the buffer would contain uninitialised memory."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(ARCHITECTURES["llama"]())
        model.model.register_buffer("lost", torch.arange(3.0), persistent=False)
    materialize(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"buffer model\.lost"):
        init_buffers(model, set(), torch.device("cpu"))


def test_generation_config_is_loaded(tiny):
    (tiny / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2, 7]}))
    generation = load_policy(TrainerModelConfig(name=str(tiny)), seed=0).causal_lm.generation_config
    assert (generation.temperature, generation.eos_token_id) == (0.6, [2, 7])


def test_cached_download_is_used_and_a_missing_one_raises_one_line(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(model_download.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache/models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    shutil.copytree(tiny, repository / "snapshots/abc")
    assert model_download.model_directory("some/model") == repository / "snapshots/abc"
    with pytest.raises(ConfigError, match="cannot download 'no/model'") as caught:
        model_download.model_directory("no/model")
    assert "\n" not in str(caught.value)


def test_download_that_hangs_times_out(tmp_path, monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(model_download.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download, "snapshot_download", lambda *_, **__: stuck.wait())
    with pytest.raises(
        DeadlineError, match=r"waited 0 s for the download of some/model, to .*\(model\.download_timeout_seconds\)"
    ):
        model_download.model_directory("some/model", 0.2)
    stuck.set()


def test_download_lock_held_by_another_process_times_out_with_its_pid(tmp_path, monkeypatch):
    monkeypatch.setattr(model_download.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    lock = tmp_path / "cache/.locks/prime-rl--some--model.lock"
    lock.parent.mkdir(parents=True)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(DeadlineError, match=rf"process {other.pid} .* to download some/model"):
            model_download.model_directory("some/model", 0.3)
        other.communicate()


def fail_on_one(world, argument):
    path = argument if world.rank else "/no/such/model"
    try:
        make_policy(TrainerModelConfig(name=path), 0, world)
    except (ConfigError, RunError) as error:
        return str(error)


def test_rank_without_the_model_raises_on_all_ranks(tiny, tmp_path):
    """A missing model on one node raises on all ranks (I7)."""
    lacks, has = run_world(2, fail_on_one, str(tiny), tmp_path, timeout=100)
    assert "does not exist" in lacks and "another rank" in has
