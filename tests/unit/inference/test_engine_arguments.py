"""Conversion of `vllm.*` keys to vLLM's command line."""

import json
import re
from argparse import Action
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError
from prime_rl.inference.vllm.engine_arguments import (
    _defaults,
    _flags,
    check_cores,
    check_model,
    explain_refusal,
    load_plugins,
    make_arguments,
    prepare_environment,
)


def _known(*flags: str, nargs: int | None = None) -> dict[str, Action]:
    names = {flag: flag.removeprefix("--no-").removeprefix("--").replace("-", "_") for flag in flags}
    return {flag: Action([flag], name, nargs=nargs) for flag, name in names.items()}


def _config(**keys: Any) -> InferenceConfig:
    return InferenceConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (None, []),
        (16, ["--a-key", "16"]),
        (True, ["--a-key"]),
        (False, ["--no-a-key"]),
        ({"b": [1]}, ["--a-key", '{"b": [1]}']),
        (["x", 1], ["--a-key", "x", "1"]),
    ],
)
def test_flags_formats_values_for_vllm(value, flags):
    assert (
        _flags("a_key", value, _known("--a-key", "--no-a-key", nargs=0 if isinstance(value, bool) else None)) == flags
    )


def test_flags_without_a_negation_or_an_argument():
    assert _flags("a_key", False, _known("--a-key", nargs=0)) == []
    with pytest.raises(ConfigError, match=r"vllm\.no_such: vLLM's server has no such argument"):
        _flags("no_such", 1, _known("--such"))


@pytest.fixture
def environment(monkeypatch):
    """The environment of this process, empty at first."""
    values = dict[str, str]()
    monkeypatch.setattr("prime_rl.inference.vllm.engine_arguments.os.environ", values)
    return values


@pytest.mark.parametrize(
    ("name", "of_the_user", "expected"),
    [
        # Their routes change weights, or sample without a pin.
        ("VLLM_SERVER_DEV_MODE", "1", "0"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1", "0"),
        ("VLLM_ENABLE_RESPONSES_API_STORE", "1", "0"),
        # Without the limit the engine grew by 2 MB per step (benchmarks/leaks.py).
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "", "128"),
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024", "1024"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "", "2401"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "60", "60"),
    ],
)
def test_prepare_environment_sets_variables_of_vllm(environment, name, of_the_user, expected):
    environment.update({name: of_the_user} if of_the_user else {})
    prepare_environment(_config(parallel={"wait_timeout_seconds": 2400.5}), on_cpu=True)
    assert environment[name] == expected


@pytest.mark.parametrize("name", ["VLLM_DP_SIZE", "VLLM_MODEL_REDIRECT_PATH", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"])
def test_prepare_environment_rejects_variables_that_change_the_model(environment, name):
    environment[name] = "2"
    with pytest.raises(ConfigError, match=rf"^the environment variable {name} is not supported: .*; unset it$"):
        prepare_environment(_config(), on_cpu=False)


def test_root_without_sys_or_lscpu_is_refused_with_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"cores in .*possible, which is not there; mount /sys"):
        check_cores(tmp_path / "possible")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="lscpu, which is not there; install util-linux"):
        check_cores()


def test_load_plugins_loads_parsers_and_rejects_unknown_ones(tmp_path):
    pytest.importorskip("vllm")
    from vllm.tool_parsers import ToolParserManager

    plugin = tmp_path / "parser.py"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParser, ToolParserManager\n"
        "@ToolParserManager.register_module('ours_alone')\n"
        "class OursAlone(ToolParser):\n    pass\n"
    )
    keys = {"enable_auto_tool_choice": True, "tool_call_parser": "ours_alone"}
    model = Path("configs/reverse_text/model")
    with pytest.raises(ConfigError, match=r"^vllm: invalid tool call parser: ours_alone"):
        load_plugins(make_arguments(_config(vllm=keys), model, on_cpu=True))
    with pytest.raises(ConfigError, match=r"^vllm\.tool_parser_plugin: /no/such.py is not a file"):
        load_plugins(make_arguments(_config(vllm={**keys, "tool_parser_plugin": "/no/such.py"}), model, on_cpu=True))
    load_plugins(make_arguments(_config(vllm={**keys, "tool_parser_plugin": str(plugin)}), model, on_cpu=True))
    assert "ours_alone" in ToolParserManager.list_registered()
    with pytest.raises(ConfigError, match=r"^vllm\.reasoning_parser: no_such is not a parser of vLLM; available"):
        load_plugins(make_arguments(_config(vllm={"reasoning_parser": "no_such"}), model, on_cpu=True))


TWO_COPIES = {"parallel": {"dp": 2}}


@pytest.mark.parametrize(
    ("model", "keys", "error"),
    [
        ({"num_experts": 4}, TWO_COPIES, r"parallel.dp = 2: .* is a mixture of experts"),
        ({"text_config": {"n_routed_experts": 8}}, TWO_COPIES, r"parallel.dp = 2: .* is a mixture of experts"),
        ({}, {"enable_return_routed_experts": True}, "^enable_return_routed_experts = true: .* has no experts"),
        (
            {"num_experts": 4, "num_experts_per_tok": 1}, {"enable_return_routed_experts": True},
            "^enable_return_routed_experts = true: .* chooses one expert per token",
        ),
        ({"model_type": "bamba"}, {}, r"^model\.name: .*\(bamba\) on a CPU: vLLM .* has no class for it"),
        ({"model_type": "olmo_hybrid"}, {}, r"\(olmo_hybrid\) on a CPU: .* kernels for GPUs"),
        ({"model_type": "lfm2", "tie_word_embeddings": False}, {}, "tie_word_embeddings = false, which vLLM"),
        ({"model_type": "qwen3_next", "tie_word_embeddings": True}, {}, "tie_word_embeddings = true, which vLLM"),
        ({"model_type": "lfm2", "conv_dim": 8, "hidden_size": 8}, {}, "lacks block_dim, .* add block_dim = 8"),
        ({"linear_num_value_heads": 4}, {"enable_lora": True}, "^enable_lora = true: .* gated delta layers"),
        ({"num_experts": 4}, {"enable_lora": True}, "^enable_lora = true: .* .* the experts of .* on a CPU"),
        # Published versions have no scales.
        ({"quantization_config": {"quant_method": "fp8"}}, {}, r"is quantized \(fp8\), and published versions"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 2}, {"parallel": {"tp": 3}},
            r"parallel\.tp = 3: .*4 attention heads and 2 of keys .*; use 1, 2, 4$",
        ),
        (
            {"text_config": {"num_attention_heads": 16}}, {"parallel": {"tp": 32}},
            r"parallel\.tp = 32: .*16 attention heads, which .*; use 1, 2, 4, 8, 16$",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6}, {"parallel": {"tp": 4}},
            r"parallel\.tp = 4: .*6 of keys and values, .*; use 1, 2, 3, 6, 12$",
        ),
    ],
)  # fmt: skip
def test_check_model_rejects_models_that_vllm_runs_wrongly(tmp_path, model, keys, error):
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=error):
        check_model(_config(**keys), tmp_path, on_cpu=True)


@pytest.mark.parametrize(
    ("model", "keys", "on_cpu"),
    [
        ({"num_experts": 4}, TWO_COPIES, False),
        ({"num_experts": 4}, {}, True),
        ({"num_experts": None}, TWO_COPIES, True),
        ({"text_config": {"quantization_config": {}}}, {}, False),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, {"parallel": {"tp": 6}}, False),
        ({"num_attention_heads": 8, "num_key_value_heads": 3, "kv_lora_rank": 8}, {"parallel": {"tp": 8}}, False),
        ({"num_attention_heads": [4, 8]}, {"parallel": {"tp": 3}}, False),
        ({}, {"parallel": {"tp": 3}}, False),
    ],
)
def test_check_model_accepts_other_models(tmp_path, model, keys, on_cpu):
    (tmp_path / "config.json").write_text(json.dumps(model))
    check_model(_config(**keys), tmp_path, on_cpu)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("too long:\nuse less.", "vllm: too long: use less$"),
        ("AuxOutput Connector requires prefix caching.", "enable_return_routed_experts = true needs .* remove it, or "),
    ],
)
def test_explain_refusal_is_one_line(said, expected):
    class Arguments(BaseModel):
        @model_validator(mode="after")
        def check(self):
            raise ValueError(said)

    with pytest.raises(ValidationError) as refused:
        Arguments()
    assert re.match(expected, str(explain_refusal(refused.value)))


def test_explain_refusal_names_the_key():
    class Arguments(BaseModel):
        prompt_lookup_max: int = Field(ge=1)

    with pytest.raises(ValidationError) as refused:
        Arguments(prompt_lookup_max=0)
    assert str(explain_refusal(refused.value)).startswith("vllm: prompt_lookup_max: Input should be greater")


@pytest.mark.parametrize(
    "model",
    [{"head_dim": 16, "num_attention_heads": 4}, {"text_config": {"hidden_size": 64, "num_attention_heads": 4}}],
)
def test_check_model_rejects_head_sizes_without_a_cpu_kernel(tmp_path, model):
    """The engine would crash in its first request."""
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=r"has attention heads of size 16, for which vLLM has no CPU kernel; supp"):
        check_model(_config(), tmp_path, on_cpu=True)
    check_model(_config(), tmp_path, on_cpu=False)
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(latent | {"kv_lora_rank": 32}))
    with pytest.raises(ConfigError, match=r"has a latent \(.*\) of size 96, for which .* no CPU kernel; .* sizes: 576"):
        check_model(_config(), tmp_path, on_cpu=True)
    for fits in (
        latent,
        {"head_dim": 32, "num_attention_heads": 4},
        {"kv_lora_rank": 8, "head_dim": 16, "num_attention_heads": 4},
        {},
    ):
        (tmp_path / "config.json").write_text(json.dumps(fits))
        check_model(_config(), tmp_path, on_cpu=True)


def test_defaults_differ_between_cpu_and_gpu(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = _config(model={"name": "a/b", "max_model_len": 64}, parallel={"tp": 2, "dp": 3}, seed=5)
    gpu, cpu = _defaults(config, tmp_path, on_cpu=False), _defaults(config, tmp_path, on_cpu=True)
    assert (gpu["dtype"], gpu["enforce_eager"], gpu["tensor_parallel_size"], gpu["data_parallel_size"]) == (
        "auto", False, 2, 3,
    )  # fmt: skip
    assert (cpu["dtype"], cpu["enforce_eager"], cpu["kv_cache_memory_bytes"]) == ("float32", True, 2**29)
    assert (gpu["served_model_name"], gpu["model"], gpu["max_model_len"], gpu["seed"]) == (
        ["a/b"],
        str(tmp_path),
        64,
        5,
    )
    chosen = _defaults(_config(model={"dtype": "bfloat16", "enforce_eager": False}), tmp_path, on_cpu=True)
    assert (chosen["dtype"], chosen["enforce_eager"]) == ("bfloat16", False)
    assert "enable_lora" not in gpu
    lora = _defaults(_config(enable_lora=True, max_loras=3, max_lora_rank=20), tmp_path, on_cpu=False)
    assert (lora["enable_lora"], lora["max_loras"], lora["max_lora_rank"]) == (True, 4, 32)
