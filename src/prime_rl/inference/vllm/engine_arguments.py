"""Converts our configuration to vLLM's arguments and environment, and reports the error that ends an engine."""

import importlib.metadata
import json
import math
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from pydantic import ValidationError

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.vllm_arguments import FIXED, UNSUPPORTED_VARIABLES
from prime_rl.core.entry_point import ERROR_FILE, read_error_file, write_error_file
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.storage.model_files import has_experts, refuse_quantized

_QWEN35 = "vLLM's class for it imports torchvision; install it: uv pip install --no-deps torchvision==0.28.0"
# Model types that vLLM's CPU build cannot run, or runs wrongly, with the reason and the fix.
_NOT_ON_CPU = {
    "bamba": "vLLM 0.32 has no class for it; serve another model",
    "olmo_hybrid": "its recurrent layers are kernels for GPUs; serve it on a GPU",
    **{f"qwen3_5{kind}": _QWEN35 for kind in ("", "_text", "_moe", "_moe_text") if not find_spec("torchvision")},
}

_CORES = Path("/sys/devices/system/cpu/possible")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks with kernels in vLLM; smaller adapters are padded with zeros."""
# Keys of the size of recurrent states (gated delta nets, Mamba, short convolutions).
_RECURRENT = ("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "mamba_d_state", "conv_L_cache")


def prepare_vllm(config: InferenceConfig, model_path: Path) -> bool:
    """Set vLLM's environment, check the model and vLLM itself, and patch it; returns whether it is the CPU build."""
    on_cpu = runs_on_cpu()
    prepare_environment(config, on_cpu)
    check_model(config, model_path, on_cpu)

    from prime_rl.inference.vllm import patches
    from prime_rl.inference.vllm.route_recorder import allow_routes_on_cpu

    patches.keep_log_file()
    patches.check_hooks()
    report_engine_errors()
    if config.enable_return_routed_experts and on_cpu:
        allow_routes_on_cpu()
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
        check_cores()
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


def check_cores(possible: Path = _CORES) -> None:
    """Raise ConfigError if `lscpu` fails, from which each engine of vLLM's CPU build gets the cores."""
    if shutil.which("lscpu") is None:
        raise ConfigError("vLLM's CPU build needs the command lscpu, which is not there; install util-linux")
    if not possible.exists():
        raise ConfigError(
            f"vLLM's CPU build needs the list of cores in {possible}, which is not there; mount /sys in this container "
            "or root, as with `mount -t sysfs sysfs /sys`"
        )


def check_model(config: InferenceConfig, model_path: Path, on_cpu: bool) -> None:
    """Raise ConfigError for a model that cannot be updated, or whose first request would crash the engine."""
    model = json.loads((model_path / "config.json").read_text())
    text = model.get("text_config", model)
    if on_cpu and (reason := _NOT_ON_CPU.get(model.get("model_type", ""))):
        raise ConfigError(f"model.name: vLLM cannot run {config.model.name} ({model['model_type']}) on a CPU: {reason}")
    _check_hybrid_model(config.model.name, text)
    drafts = config.vllm.get("speculative_config")
    if drafts and drafts["method"] == "suffix" and not find_spec("arctic_inference"):
        raise ConfigError("vllm.speculative_config: suffix needs a package; run `uv pip install arctic-inference`")
    if drafts and any(text.get(key) for key in _RECURRENT):
        raise ConfigError(
            f"vllm.speculative_config: not tested with the recurrent layers of {config.model.name}; leave it out"
        )
    layers = "experts" if has_experts(model) else "gated delta layers" if text.get("linear_num_value_heads") else None
    if on_cpu and config.enable_lora and layers:
        raise ConfigError(
            f"enable_lora = true: vLLM has no adapters for the {layers} of {config.model.name} on a CPU; "
            "publish full weights, or serve it on a GPU"
        )
    if config.enable_return_routed_experts and not has_experts(model):
        raise ConfigError(
            f"enable_return_routed_experts = true: {config.model.name} has no experts; leave it out, and in the "
            "trainer model.router_replay, for which rl sets it"
        )
    if config.enable_return_routed_experts and text.get("num_experts_per_tok") == 1:
        raise ConfigError(
            f"enable_return_routed_experts = true: {config.model.name} chooses one expert per token, which "
            "router replay does not support; leave it out"
        )
    # vLLM runs copies of such models in lockstep and exchanges tokens; its CPU build cannot.
    if on_cpu and config.parallel.dp > 1 and has_experts(model):
        raise ConfigError(
            f"parallel.dp = {config.parallel.dp}: {config.model.name} is a mixture of experts, of which vLLM "
            "cannot run several copies on a CPU; start one server per copy, and set all addresses in client.base_url"
        )
    refuse_quantized(config.model.name, model)
    _check_heads(config, text)
    if on_cpu and text.get("num_attention_heads"):
        _check_head_size(config.model.name, text)


def _check_head_size(name: str, text: Mapping[str, Any]) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    backend: Any = CPUAttentionBackend
    what, size = "attention heads", text.get("head_dim") or text.get("hidden_size", 0) // text["num_attention_heads"]
    if rank := text.get("kv_lora_rank"):
        # Imported after the backends, because vLLM's modules import each other.
        from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

        fields: Any = SimpleNamespace(**text)
        if not ModelArchConfigConvertorBase(fields, fields).is_deepseek_mla():
            return  # the model's code in vLLM chooses the size of its heads
        backend = CPUMLABackend
        what, size = "a latent (kv_lora_rank + qk_rope_head_dim)", rank + text.get("qk_rope_head_dim", 0)
    sizes = backend.get_supported_head_sizes()
    if size and size not in sizes:
        raise ConfigError(
            f"model.name: {name} has {what} of size {size}, for which vLLM has no CPU kernel; "
            f"supported sizes: {', '.join(map(str, sizes))}"
        )


def _check_heads(config: InferenceConfig, text: Mapping[str, Any]) -> None:
    """Raise ConfigError if `parallel.tp` ranks cannot share the attention heads: vLLM fails much later."""
    tp, heads = config.parallel.tp, text.get("num_attention_heads")
    pairs = heads if text.get("kv_lora_rank") else text.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(pairs, int)):  # a list: other numbers in each layer
        return
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (pairs % n == 0 or n % pairs == 0)]
    if tp not in fitting:
        kinds = f"{heads} attention heads" + (f" and {pairs} of keys and values" if pairs != heads else "")
        raise ConfigError(
            f"parallel.tp = {tp}: {config.model.name} has {kinds}, which {tp} GPUs cannot share equally; use "
            + ", ".join(map(str, fitting))
        )


def _check_hybrid_model(name: str, text: Mapping[str, Any]) -> None:
    """Raise ConfigError where vLLM's class reads the configuration of a hybrid model in another way."""
    kind, needed = text.get("model_type"), {"lfm2": ("conv_dim", "block_dim"), "lfm2_moe": ("conv_dim",)}
    tied = text.get("tie_embedding", text.get("tie_word_embeddings", kind != "qwen3_next"))
    if (kind in needed and not tied) or (kind == "qwen3_next" and tied):
        raise ConfigError(
            f"model.name: {name} has tie_word_embeddings = {str(bool(tied)).lower()}, which vLLM's class for {kind} "
            "ignores: its log-probabilities would be wrong; serve another model"
        )
    if missing := [key for key in needed.get(str(kind), ()) if key not in text]:
        raise ConfigError(
            f"model.name: config.json of {name} lacks {', '.join(missing)}, which vLLM's class for {kind} reads; "
            f"add {', '.join(missing)} = {text.get('hidden_size')} (hidden_size)"
        )


def forks_engines(config: InferenceConfig, on_cpu: bool) -> bool:
    """Whether engines are forked and run their worker in their own process (`patches.start_fast_on_cpu`).

    With `vllm.distributed_executor_backend = "mp"` they start on a CPU as on a GPU.
    """
    return on_cpu and config.parallel.tp == 1 and "distributed_executor_backend" not in config.vllm


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build. Reads the package's metadata: an import takes seconds."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def make_arguments(config: InferenceConfig, model_path: Path, on_cpu: bool, head: str | None = None) -> Namespace:
    """Build the arguments of vLLM's server: our defaults, overridden by `config.vllm`, then the fixed ones.

    `head` is the IP address of the head, for a server over several nodes.

    Raises:
        ConfigError: an argument in `config.vllm` has an invalid value.
    """
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
        "enable_return_routed_experts": config.enable_return_routed_experts,
    }
    if config.enable_lora:
        rank = next(rank for rank in _LORA_RANKS if rank >= config.max_lora_rank)
        values |= {"enable_lora": True, "max_loras": config.max_loras + 1, "max_lora_rank": rank}  # + the base slot's
    config_file = json.loads((model_path / "config.json").read_text())
    text = config_file.get("text_config", config_file)
    recurrent = any(text.get(key) for key in _RECURRENT)
    if recurrent:
        values["mamba_ssm_cache_dtype"] = "float32"  # the trainer's: rounding at every token adds up
    if on_cpu:
        values |= {
            "dtype": "float32" if model.dtype == "auto" else model.dtype,
            "enforce_eager": model.enforce_eager is not False,
            "kv_cache_memory_bytes": 512 * 2**20,
            "max_num_seqs": 256,
            "enable_chunked_prefill": recurrent,  # their prefix cache requires it
            "distributed_executor_backend": "uni" if forks_engines(config, on_cpu) else None,
        }
    return values


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


def explain_refusal(error: ValidationError) -> ConfigError:
    """Return the first reason for which vLLM refuses its configuration."""
    first = error.errors()[0]
    reason = ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
    if "AuxOutput" in reason and "prefix caching" in reason:
        return ConfigError(
            "enable_return_routed_experts = true needs the prefix cache, which vllm.enable_prefix_caching = "
            "false disables, or which vLLM lacks for this model (on a CPU: latent attention); "
            "remove it, or model.router_replay"
        )
    return ConfigError(f"vllm: {' '.join(reason.split()).rstrip('.')}")


def _flags(key: str, value: Any, known: Mapping[str, Any]) -> list[str]:
    """Format one argument for vLLM's command line."""
    flag = f"--{key.replace('_', '-')}"
    if flag not in known:
        raise ConfigError(f"vllm.{key}: vLLM's server has no such argument")
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


_original: dict[str, Callable[..., None]] = {}


def _error_file() -> Path:
    """The file is in the folder for temporary files that a server shares with its engines alone."""
    return Path(tempfile.gettempdir(), "engine_error.json")


def read_engine_error() -> str | None:
    """Return the error of the first engine of this server that failed; None if none has reported one."""
    error = read_error_file(_error_file())
    return error.message if error is not None else None


def report_engine_errors() -> None:
    """Have engines and workers write the error that ends them. Must be called in each process that starts some.

    Without it tests/integration/inference/test_engine_errors.py fails.
    """
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if not _original:
        _original["engine"], _original["worker"] = EngineCoreProc.run_engine_core, WorkerProc.worker_main
        EngineCoreProc.run_engine_core, WorkerProc.worker_main = staticmethod(_run_engine), staticmethod(_run_worker)
        WorkerProc.__init__ = _reporting(WorkerProc.__init__)  # the main function of a worker does not raise


def _run_engine(*args: Any, **kwargs: Any) -> None:
    """Main function of an engine. A spawned one imports this module, and vLLM is not patched in it."""
    from prime_rl.inference.vllm.patches import report_start_of_engine

    report_engine_errors()
    report_start_of_engine(kwargs.get("dp_rank", 0))
    _reporting(_original["engine"])(*args, **kwargs)


def _run_worker(*args: Any, **kwargs: Any) -> None:
    """Main function of a worker process, as of an engine."""
    report_engine_errors()
    _original["worker"](*args, **kwargs)


def _reporting(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            os.environ[ERROR_FILE] = str(_error_file())
            write_error_file(summarize_exception(error, full=True), 1)
            raise

    return call
