"""From `vllm.*` keys to vLLM's command line."""

import json
from typing import Any

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.arguments import _defaults, _flags, _refuse, check_copies, prepare_environment


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
def test_spells_values_as_vllm_does(value: object, flags: list[str]) -> None:
    assert _flags("a_key", value, {"--a-key": None, "--no-a-key": None}) == flags


def test_a_switch_without_an_opposite_is_left_out() -> None:
    assert _flags("a_key", False, {"--a-key": None}) == []


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.no_such: vLLM's server has no such argument"):
        _flags("no_such", 1, {"--such": None})


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("logprobs_mode", "is set by the server"),
        ("scheduler_cls", "is set by the server"),
        ("tensor_parallel_size", "set parallel.tp instead"),
        ("port", "set server.port instead"),
        ("kv_transfer_config", "not supported"),
        ("enable_lora", "set enable_lora instead"),
        ("lora_modules", "POST /load_adapter"),
    ],
)
def test_refuses_what_the_server_promises_on(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"vllm.{key}.*{reason}"):
        _refuse({key: 1})


def test_the_kernels_that_a_cpu_keeps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/leaks.py: the engine grew by 2 MB a step without it."""
    name, environment = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", dict[str, str]()
    monkeypatch.setattr("prime_rl.inference.arguments.os.environ", environment)
    prepare_environment(_config(), on_cpu=False)
    assert name not in environment
    prepare_environment(_config(), on_cpu=True)
    assert int(environment[name]) <= 128
    environment[name] = "1024"
    prepare_environment(_config(), on_cpu=True)
    assert environment[name] == "1024", "a user's own"


def test_a_default_of_ours_can_be_overridden() -> None:
    _refuse({"max_model_len": 1024, "max_num_seqs": 8, "dtype": "float32"})


@pytest.mark.parametrize("model", [{"num_experts": 4}, {"text_config": {"n_routed_experts": 8}}])
def test_copies_of_a_mixture_of_experts_need_a_gpu(tmp_path: Any, model: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    two = _config(parallel={"dp": 2})
    with pytest.raises(ConfigError, match=r"parallel.dp = 2: .* is a mixture of experts"):
        check_copies(two, tmp_path, on_cpu=True)
    check_copies(two, tmp_path, on_cpu=False)
    check_copies(_config(), tmp_path, on_cpu=True)
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": None}))
    check_copies(two, tmp_path, on_cpu=True)


def test_defaults_on_cpu_and_gpu(tmp_path: Any) -> None:
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


def test_adapters_are_off_unless_asked_for(tmp_path: Any) -> None:
    assert "enable_lora" not in _defaults(_config(), tmp_path, on_cpu=False)
    values = _defaults(_config(enable_lora=True, max_loras=3, max_lora_rank=20), tmp_path, on_cpu=False)
    assert (values["enable_lora"], values["max_loras"], values["max_lora_rank"]) == (True, 3, 32)
