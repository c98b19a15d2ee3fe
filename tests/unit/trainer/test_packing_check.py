"""The packing check at start passes supported models in every precision and refuses others."""

import pytest
import torch
import transformers

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model import policy_model as model_module
from prime_rl.trainer.packing_check import PackingDifference, check_packing
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES, save
from tests.unit.trainer.test_rope import ORIGINAL, config
from tests.unit.trainer.world import run_command

LEAKY = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

class Leaky(Qwen3MLP):
    def forward(self, x):
        return super().forward(x + 0.3 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

class LeakyForCausalLM(Qwen3ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = Leaky
"""


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def recurrent():
    return transformers.RecurrentGemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, lru_width=32
    )


def check(path, world, dtype, **keys):
    keys = {"seq_len": 512, "dtype": dtype, **keys}
    options = TrainerModelConfig(name=str(path), **keys)
    policy = make_policy(options, 0, world)
    forward_passes = []
    policy.register_forward_hook(lambda _, rows, __: forward_passes.append(len(rows[0].tokens)))
    check_packing(policy, options, world, options.seq_len)
    return forward_passes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma3_window", "float32"),
        ("gpt2", "float32"),
        ("qwen3_moe", "bfloat16"),
        ("gpt_oss_sinks_window", "bfloat16"),
    ],
)
def test_packing_check_of_a_supported_model_passes(name, dtype, world, tmp_path):
    save(ARCHITECTURES[name](), tmp_path)
    assert check(tmp_path, world, dtype) == [88, 88, 24, 64]


@DTYPES
def test_packing_check_of_a_recurrent_model_raises(dtype, world, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "check_output_head", lambda *_: None)
    save(recurrent(), tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.name: .* change with the other samples of its row") as caught:
        check(tmp_path, world, dtype)
    assert "\n" not in str(caught.value)


def test_packing_check_names_weights_that_are_not_finite(world, tmp_path):
    model = save(ARCHITECTURES["gpt2"](), tmp_path)
    name = "transformer.h.1.mlp.c_fc.weight"
    model.get_parameter(name).data[0, 3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"not finite: {name} contains NaN"):
        check(tmp_path, world, "float32")


@DTYPES
def test_packing_check_of_row_dependent_frequencies_raises(dtype, world, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "fix_frequencies", lambda *_: None)
    save(config("longrope"), tmp_path)
    with pytest.raises(ConfigError, match="change from those alone"):
        check(tmp_path, world, dtype)
    assert check(tmp_path, world, dtype, seq_len=ORIGINAL)  # where no row is long, there is nothing to see


def test_packing_check_reaches_the_lengths_where_positions_change(world, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    small = {**ARCHITECTURES["llama"]().to_dict(), "max_position_embeddings": 512, "rope_parameters": yarn}
    save(transformers.LlamaConfig(**small), tmp_path / "yarn")
    for seq_len, lengths in ((512, [184, 184, 24, 160]), (128, [88, 88, 24, 64]), (40, [40, 40, 10, 30]), (4, [])):
        assert check(tmp_path / "yarn", world, "float32", seq_len=seq_len) == lengths
    save(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=48), tmp_path / "gpt2")
    assert check(tmp_path / "gpt2", world, "float32") == [72, 72, 24, 48], "at most the positions of the model"


def test_packing_check_of_compiled_blocks_compiles_nothing(world, tmp_path):
    """Compiling for the lengths of the samples would take longer than all the rest."""
    save(ARCHITECTURES["llama"](), tmp_path)
    torch._dynamo.utils.counters.clear()
    assert check(tmp_path, world, "float32", compile={}) == [88, 88, 24, 64]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert check(tmp_path, world, "bfloat16", lora={"rank": 4, "dropout": 0.5}, ac={"freq": 1}, ac_offloading={})


def test_packing_difference_that_is_not_finite_is_excessive():
    some = torch.full((8,), 1e-6)
    assert PackingDifference(some, [some, some]).excess(torch.float32, is_moe=False) is None
    for one in (torch.nan, torch.inf):
        broken = some.clone()
        broken[3] = one
        assert PackingDifference(some, [some, broken]).excess(torch.float32, is_moe=False)
        assert PackingDifference(broken, [some]).excess(torch.bfloat16, is_moe=True)


@pytest.mark.parametrize("command", ["trainer", "sft"])
def test_command_with_a_model_that_mixes_samples_exits_with_one_line(command, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    (model / "leaky.py").write_text(LEAKY)
    settings = transformers.Qwen3Config.from_pretrained(model)
    settings.auto_map, settings.architectures = {"AutoModelForCausalLM": "leaky.LeakyForCausalLM"}, ["LeakyForCausalLM"]
    settings.save_pretrained(model)
    data = ["--data.fake"] if command == "trainer" else ["--data.type", "fake"]
    arguments = ["--model.name", model, "--model.trust-remote-code", "--output-dir", tmp_path / "run", "--max-steps", 1]
    code, error = run_command(command, [*arguments, "--device", "cpu", *data])
    assert code == 2, error
    (line,) = [line for line in error.splitlines() if "model.name" in line]
    assert str(model) in line and "change with the other samples" in line and "Traceback" not in error
