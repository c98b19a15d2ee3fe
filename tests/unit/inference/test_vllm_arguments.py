"""Every argument of the installed vLLM is in one list: accepted, or rejected with a reason."""

import json
from collections import Counter
from pathlib import Path

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.vllm_arguments import ALLOWED, ELSEWHERE, FIXED, RESTRICTED, UNSUPPORTED
from prime_rl.core.errors import ConfigError
from prime_rl.inference.vllm.engine_arguments import forks_engines, make_arguments

MODEL = Path("configs/reverse_text/model")
# Names for keys of ours; vLLM has no such argument.
_OURS_ALONE = {"headless", "model_tag"}


def _arguments_of_vllm() -> set[str]:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return {action.dest for action in make_arg_parser(FlexibleArgumentParser(add_help=False))._actions}


def test_every_argument_of_vllm_is_in_exactly_one_list():
    listed = Counter([*FIXED, *ELSEWHERE, *UNSUPPORTED, *RESTRICTED, *ALLOWED])
    assert [name for name, count in listed.items() if count > 1] == []
    theirs = _arguments_of_vllm()
    assert sorted(theirs - listed.keys()) == [], "add them to a list of vllm_arguments.py"
    assert sorted(listed.keys() - theirs - _OURS_ALONE) == [], "vLLM has removed them"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"enable_eplb": True}, "enable_eplb: not supported: loaders use the initial"),
        ({"enable-eplb": True}, "enable_eplb: not supported"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "weight_transfer_config: not supported"),
        ({"speculative_config": "ngram"}, "speculative_config: is a table"),
        (
            {"speculative_config": {"model": "m"}},
            "speculative_config: method = None is not supported",
        ),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
            "speculative_config: rejection_sample_method is not supported with method = 'ngram'",
        ),
        (
            {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
            "speculative_config: model is missing",
        ),
        *(
            (
                {"speculative_config": {"method": "ngram", "num_speculative_tokens": number}},
                "speculative_config: num_speculative_tokens = .* must be a whole number from 1 to 128",
            )
            for number in (0, 129, True, "4", None)
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 129}},
            "speculative_config: num_speculative_tokens = 129 must be",
        ),
        ({"api_server_count": 2}, "api_server_count: not supported: one process must know which policy is loaded"),
        ({"load_format": "dummy"}, r"load_format: dummy is not supported .*; supported: auto, safetensors"),
        ({"scheduling_policy": "priority"}, "scheduling_policy: priority is not supported"),
        ({"hf_overrides": {"a": 1}}, r"hf_overrides: is set by the server \({'head_dtype': 'float32'}\) and cannot"),
        ({"logprobs_mode": "raw"}, "logprobs_mode: is set by the server"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: set parallel.tp instead"),
        ({"max_model_len": 8}, "max_model_len: set model.max_model_len instead"),
        ({"lora_modules": "a"}, r"lora_modules: not supported: .*POST /load_adapter"),
        ({"nosuch": "x"}, r"nosuch: is no argument of vLLM's server .*; remove it"),
        ({"max_num_seq": 4}, r"max_num_seq: is no argument .*; did you mean vllm.max_num_seqs\?"),
        ({"no_enable_prefix_caching": True}, r"no_enable_prefix_caching: .*did you mean vllm.enable_prefix_caching\?"),
        ({"device_memory_utilization": 0.5}, r"device_memory_utilization: .*did you mean gpu_memory_utilization\?"),
    ],
)
def test_unsupported_arguments_are_rejected_in_one_line_before_a_start(extra, message):
    [(key, value)] = extra.items()
    with pytest.raises(ConfigError, match=rf"vllm: {message}") as caught:
        InferenceConfig.load([f"--vllm.{key}", json.dumps(value)])
    assert "\n" not in str(caught.value)


def test_unsupported_argument_of_a_run_is_rejected():
    with pytest.raises(ConfigError, match=r"inference\.vllm: enable_eplb: not supported"):
        RLConfig.load(["--inference.vllm.enable_eplb", "true"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", None),
        ("--orchestrator.sampling.min-p 0.1", r"orchestrator\.sampling\.min_p: not supported by inference"),
        ("--inference.enable-return-routed-experts", "not tested with enable_return_routed_experts = true"),
        ("--inference.vllm.return-sampling-mask true", "not tested with vllm.return_sampling_mask = true"),
    ],
)
def test_drafts_are_refused_with_what_was_not_tested(line, message):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    arguments = ["--inference.vllm.speculative-config", json.dumps(drafts), *line.split()]
    if message is None:
        assert RLConfig.load(arguments).inference.vllm["speculative_config"] == drafts
        return
    with pytest.raises(ConfigError, match=message):
        RLConfig.load(arguments)


@pytest.mark.parametrize(
    "extra",
    [
        {"served_model_name": ["a", "--enable-eplb"]},
        {"served_model_name": ["a", "-pp", "2"]},
        {"served_model_name": ["a", "--hf-overrides.rope_theta", "5"]},
        {"enable_prefix_caching": "--enable-eplb"},
        {"async_scheduling": "--enable_eplb"},
        {"enforce_eager": "-tp=2"},
        {"ignore_patterns": ["*.bin", "--config", "x.yaml"]},
    ],
)
def test_values_that_are_arguments_are_rejected(extra):
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=rf"^vllm\.{next(iter(extra))}"):
        make_arguments(InferenceConfig.model_validate({"vllm": extra}), MODEL, on_cpu=True)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        # vLLM's parser would enable it, and read the text as the name of the model.
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching = 'false' must be true or false"),
        ({"disable_log_stats": 0}, "disable_log_stats = 0 must be true or false"),
        # It would be ignored silently.
        ({"quantization": False}, "quantization = False needs a value"),
        ({"max_num_seqs": True}, "max_num_seqs = True needs a value"),
    ],
)
def test_switches_require_booleans_and_other_arguments_reject_them(extra, message):
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=rf"^vllm\.{message}"):
        make_arguments(InferenceConfig.model_validate({"vllm": extra}), MODEL, on_cpu=True)


def test_argument_in_another_spelling_is_the_same_argument(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("[vllm]\nmax-num-seqs = 4\ndistributed_executor-backend = 'mp'\n")
    config = InferenceConfig.load(["@", str(file), "--vllm.max-num-seqs", "8"])
    assert config.vllm == {"max_num_seqs": 8, "distributed_executor_backend": "mp"}
    assert not forks_engines(config, on_cpu=True)


def test_supported_values_reach_vllm():
    pytest.importorskip("vllm")
    extra = {"load_format": "safetensors", "scheduling_policy": "fcfs", "max_num_seqs": 7}
    extra |= {"allowed_methods": ["GET"], "allowed_origins": '["https://a.example"]'}  # vLLM reads these as JSON
    config = InferenceConfig.model_validate({"vllm": extra})
    arguments = make_arguments(config, MODEL, on_cpu=True)
    assert (arguments.load_format, arguments.scheduling_policy, arguments.max_num_seqs) == ("safetensors", "fcfs", 7)
    assert (arguments.allowed_methods, arguments.allowed_origins) == (["GET"], ["https://a.example"])
    assert arguments.generation_config == "vllm"
    assert arguments.hf_overrides == {"head_dtype": "float32"}
