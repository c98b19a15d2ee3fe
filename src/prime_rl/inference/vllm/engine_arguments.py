"""Converts our configuration to vLLM's arguments and environment."""

import importlib.metadata
import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.inference.vllm.argument_allowlist import ELSEWHERE, FIXED, UNSUPPORTED_VARIABLES, is_known, refusal_reason

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks with kernels in vLLM; smaller adapters are padded with zeros."""
# Keys of the number of experts in model configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def prepare_vllm(config: InferenceConfig, model_path: Path) -> bool:
    """Set vLLM's environment, check the model and vLLM itself, and patch it; returns whether it is the CPU build."""
    on_cpu = runs_on_cpu()
    prepare_environment(config, on_cpu)
    check_model(config, model_path, on_cpu)

    from prime_rl.inference.vllm import patches

    patches.keep_log_file()
    patches.check_hooks()
    if forks_engines(config, on_cpu):
        patches.start_fast_on_cpu()
    return on_cpu


def prepare_environment(config: InferenceConfig, on_cpu: bool) -> None:
    """Set the variables that vLLM reads, before its first import; raises ConfigError if an unsupported one is set."""
    for name, reason in UNSUPPORTED_VARIABLES.items():
        if os.environ.get(name):
            raise ConfigError(f"the environment variable {name} is not supported: {reason}; unset it")
    # Their routes would allow every client to change the weights.
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    # A response that is sampled in the background outlives its request, and so the pin to one version.
    os.environ["VLLM_ENABLE_RESPONSES_API_STORE"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = config.log.level.upper()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # All rollouts of a step start together: idle connections must outlive a training step.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    # Engines may read a large model from a slow disk.
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(math.ceil(config.parallel.wait_timeout_seconds)))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forking would break CUDA
    if on_cpu:
        # oneDNN caches one compiled kernel per number of tokens in a step, by default 1024: hundreds of megabytes,
        # which fill over hundreds of training steps like a memory leak.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if on_cpu and config.model.enforce_eager is not False:
        # Even in eager mode vLLM compiles the ranking of log-probabilities: seconds in the first request, and a crash
        # of the engine on a machine without a C++ compiler.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if on_cpu and config.parallel.tp > 1:
        # vLLM would bind each worker to a separate NUMA node, and fail if there are fewer.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if forks_engines(config, on_cpu):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def check_model(config: InferenceConfig, model_path: Path, on_cpu: bool) -> None:
    """Raise ConfigError for a model that cannot be updated, or whose first request would crash the engine."""
    model = json.loads((model_path / "config.json").read_text())
    text = model.get("text_config", model)
    # vLLM runs copies of such models in lockstep and exchanges tokens; its CPU build cannot.
    if on_cpu and config.parallel.dp > 1 and any(text.get(key) for key in _EXPERTS):
        raise ConfigError(
            f"parallel.dp = {config.parallel.dp}: {config.model.name} is a mixture of experts, of which vLLM "
            "cannot run several copies on a CPU; start one server per copy, and set all addresses in client.base_url"
        )
    if quantized := model.get("quantization_config") or text.get("quantization_config"):
        raise ConfigError(
            f"model.name: the checkpoint {config.model.name} is quantized ({quantized.get('quant_method', 'unknown')}) "
            "and published versions are not; serve the original checkpoint, and set vllm.quantization to quantize it "
            "while it is loaded"
        )
    if not on_cpu or text.get("kv_lora_rank") or not text.get("num_attention_heads"):
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = text.get("head_dim") or text.get("hidden_size", 0) // text["num_attention_heads"]
    if size and size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise ConfigError(
            f"model.name: {config.model.name} has attention heads of size {size}, for which vLLM has no CPU kernel; "
            f"supported sizes: {', '.join(map(str, sizes))}"
        )


def forks_engines(config: InferenceConfig, on_cpu: bool) -> bool:
    """Whether engines are forked and run their worker in their own process (`patches.start_fast_on_cpu`).

    With `vllm.distributed_executor_backend = "mp"` they start on a CPU as on a GPU.
    """
    return on_cpu and config.parallel.tp == 1 and "distributed_executor_backend" not in config.vllm


def vllm_version() -> str:
    """Return the version of the installed vLLM, from the package's metadata."""
    return importlib.metadata.version("vllm-cpu" if runs_on_cpu() else "vllm")


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build. Reads the package's metadata: an import takes seconds."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def make_arguments(config: InferenceConfig, model_path: Path, on_cpu: bool, head: str | None = None) -> Namespace:
    """Build the arguments of vLLM's server: our defaults, overridden by `config.vllm`, then the fixed ones.

    `head` is the IP address of the head, for a server over several nodes.

    Raises:
        ConfigError: `config.vllm` contains an argument that is unknown, invalid, unsupported or set by another key.
    """
    _check_supported(config.vllm)
    parallel = config.parallel
    nodes = {
        "data_parallel_size_local": parallel.copies_here,
        "data_parallel_address": head,
        "data_parallel_rpc_port": parallel.rpc_port,
        # A start rank of the head would change vLLM's load balancing.
        "data_parallel_start_rank": parallel.start_rank if parallel.headless else None,
    }
    ours = _defaults(config, model_path, on_cpu) | (nodes if head is not None else {})
    return _parse({**ours, **config.vllm, **FIXED})


def load_plugins(arguments: Namespace) -> None:
    """Import plugins with parsers of tool calls and of reasoning.

    Raises ConfigError if a file is missing, or a selected parser is unknown.
    """
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, import_plugin in (
        ("tool_parser_plugin", ToolParserManager.import_tool_parser),
        ("reasoning_parser_plugin", ReasoningParserManager.import_reasoning_parser),
    ):
        if file := getattr(arguments, key):
            if not Path(file).is_file():
                raise ConfigError(f"vllm.{key}: {file} is not a file")
            import_plugin(file)
    with translate_error(KeyError, lambda error: ConfigError(f"vllm: {error.args[0]}")):
        validate_api_server_args(arguments)
    parser, parsers = arguments.reasoning_parser, ReasoningParserManager.list_registered()
    if parser and parser not in parsers:
        raise ConfigError(f"vllm.reasoning_parser: {parser} is not a parser of vLLM; available: {', '.join(parsers)}")


def _defaults(config: InferenceConfig, model_path: Path, on_cpu: bool) -> dict[str, Any]:
    model = config.model
    values: dict[str, Any] = {
        "model": str(model_path),
        "served_model_name": [model.name],
        "host": config.server.host,
        "port": config.server.port,
        "seed": config.seed,
        "max_model_len": model.max_model_len,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "enforce_eager": bool(model.enforce_eager),
        "tensor_parallel_size": config.parallel.tp,
        "data_parallel_size": config.parallel.dp,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "disable_uvicorn_access_log": True,
    }
    if config.enable_lora:
        rank = next(rank for rank in _LORA_RANKS if rank >= config.max_lora_rank)
        values |= {"enable_lora": True, "max_loras": config.max_loras, "max_lora_rank": rank}
    if on_cpu:
        values |= {
            "dtype": "float32" if model.dtype == "auto" else model.dtype,
            "enforce_eager": model.enforce_eager is not False,
            "kv_cache_memory_bytes": 512 * 2**20,
            "max_num_seqs": 256,
            # A seeded request with a chunked prompt crashes the engine (vLLM 0.32: its CPU generator cannot be reset to
            # the offset of the previous chunk).
            "enable_chunked_prefill": False,
            "distributed_executor_backend": "uni" if forks_engines(config, on_cpu) else None,
        }
    return values


def _check_supported(extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if reason := refusal_reason(key, value):
            raise ConfigError(f"vllm.{key}: {reason}")


def _parse(values: Mapping[str, Any]) -> Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vllm: {message}")

    parser = make_arg_parser(Parser(add_help=False))
    flags = [flag for key, value in values.items() for flag in _flags(key, value, parser._option_string_actions)]
    arguments = parser.parse_args(flags)
    with translate_error((TypeError, ValueError), lambda error: ConfigError(f"vllm: {error}")):
        validate_parsed_serve_args(arguments)
    return arguments


def _flags(key: str, value: Any, known: Mapping[str, Any]) -> list[str]:
    """Format one argument for vLLM's command line."""
    flag = f"--{key.replace('_', '-')}"
    if flag not in known:
        raise ConfigError(f"vllm.{key}: vLLM's server has no such argument")
    if not is_known(argument := known[flag].dest):
        raise ConfigError(f"vllm.{key} is not supported, because it is not tested with weight updates; remove it")
    if argument != key.replace("-", "_"):  # an alias or a negation
        raise ConfigError(f"vllm.{key} is another name of vllm.{argument}; set {ELSEWHERE.get(argument, 'that key')}")
    if value is None:
        return []
    _check_value(key, value, known[flag])
    if isinstance(value, bool):
        off = f"--no-{key.replace('_', '-')}"
        return [flag] if value else [off] if off in known else []
    if isinstance(value, Mapping) or known[flag].type is json.loads:
        return [flag, value if isinstance(value, str) else json.dumps(value)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _check_value(key: str, value: Any, argument: Any) -> None:
    """Reject a value that vLLM's parser would misread as another argument or as a switch."""
    is_switch = argument.nargs == 0
    if is_switch != isinstance(value, bool):
        wanted = "must be true or false" if is_switch else "needs a value; it is not a switch"
        raise ConfigError(f"vllm.{key} = {value!r} {wanted}")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and text.startswith("-"):
            raise ConfigError(f"vllm.{key}: {text!r} begins with a dash, like an argument of vLLM's command line")
