"""From our configuration to vLLM's arguments and environment."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prime_rl.configs.inference import InferenceConfig
from prime_rl.errors import ConfigError

if TYPE_CHECKING:
    from prime_rl.configs.inference import ParallelConfig

# Set by the server itself; another value would break its promises (or has a key of its own).
_FIXED = {
    "worker_extension_cls": "prime_rl.inference.worker.WeightUpdateExtension",
    "scheduler_cls": "prime_rl.inference.scheduler.make_scheduler",
    "enable_scale_out": True,
    "logprobs_mode": "processed_logprobs",
}
_ELSEWHERE = {
    "model": "model.name",
    "host": "server.host",
    "port": "server.port",
    "api_key": "server.api_key_var",
    **{key: ours for key, ours in InferenceConfig.aliases.items() if ours.startswith("parallel.")},
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
}
_A_SERVER_EACH = "give each node a server of its own, and the orchestrator all addresses (client.base_url)"
_BY_NAME = "adapters are checked as they are loaded: POST /load_adapter (docs/inference.md)"
_UNSUPPORTED = {
    "lora_modules": _BY_NAME,
    "default_mm_loras": _BY_NAME,
    "kv_transfer_config": "KV that leaves the engine is not divided by policy version",
    "enable_ssl_refresh": "restart the server for a new certificate",
    "uds": "the server listens on server.host and server.port",
    "data_parallel_hybrid_lb": _A_SERVER_EACH,
    "data_parallel_external_lb": _A_SERVER_EACH,
    "data_parallel_multi_port_external_lb": _A_SERVER_EACH,
    "data_parallel_rank": _A_SERVER_EACH,
    "data_parallel_backend": "engines are processes of their node, not of Ray",
    "enable_elastic_ep": "the number of copies is fixed",
    "api_server_count": "one process knows which policy is loaded",
    "nnodes": "one copy of the model over several nodes; parallel.tp is for the GPUs of one node",
    "node_rank": "one copy of the model over several nodes; parallel.tp is for the GPUs of one node",
}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has kernels for; smaller ones are filled up with zeros."""
# Names under which configurations say how many experts a layer has.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CPU_KV_CACHE_BYTES = 512 * 2**20
_CPU_MAX_NUM_SEQS = 256


def prepare_environment(config: InferenceConfig, on_cpu: bool) -> None:
    """Set the variables that vLLM reads. To be called before its first import.

    Args:
        config: the server's configuration.
        on_cpu: vLLM is the CPU build.
    """
    # Their routes would let anybody change the weights behind our back.
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = config.log.level.upper()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Rollouts of a step end together and the next begin together: idle connections must outlive a training step.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forking would break CUDA
    if on_cpu:
        # oneDNN keeps the kernels it has compiled, one for each number of tokens that a step has had. By default 1024:
        # hundreds of megabytes, which fill up over hundreds of training steps as a leak would.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if on_cpu and config.model.enforce_eager is not False:
        # Eager or not, vLLM compiles how it counts ranks of log-probabilities: seconds in the first request, and the
        # death of the engine on a machine without a C++ compiler.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if on_cpu and config.parallel.tp > 1:
        # vLLM would bind each worker to a NUMA node of its own, and end where there are fewer.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if forks_engines(config, on_cpu):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def check_copies(config: InferenceConfig, model_path: Path, on_cpu: bool) -> None:
    """Refuse copies of a mixture of experts on a CPU: their engines would die in the first request.

    vLLM runs data-parallel engines of such models in step and has tokens travel between them; its CPU build cannot.

    Raises:
        ConfigError: says so.
    """
    if not on_cpu or config.parallel.dp == 1:
        return
    model = json.loads((model_path / "config.json").read_text())
    if any(model.get("text_config", model).get(key) for key in _EXPERTS):
        raise ConfigError(
            f"parallel.dp = {config.parallel.dp}: {config.model.name} is a mixture of experts, whose copies vLLM "
            "cannot run together on a CPU; start a server for each, and give the orchestrator all addresses "
            "(client.base_url)"
        )


def forks_engines(config: InferenceConfig, on_cpu: bool) -> bool:
    """Whether engines are forked and run their worker in their own process (`patches.start_fast_on_cpu`).

    `vllm.distributed_executor_backend = "mp"` has a CPU start them as a GPU does.
    """
    chosen = {"distributed_executor_backend", "distributed-executor-backend"} & config.vllm.keys()
    return on_cpu and config.parallel.tp == 1 and not chosen


def vllm_version() -> str:
    """The version of vLLM that is installed, from the package's metadata."""
    from importlib.metadata import version

    return version("vllm-cpu" if runs_on_cpu() else "vllm")


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build. Asks the package's metadata, since its import takes seconds."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def make_arguments(config: InferenceConfig, model_path: Path, on_cpu: bool, head: str | None = None) -> Namespace:
    """Build the arguments of vLLM's server.

    Ours are defaults that `config.vllm` overrides, except for those on which the server's promises rest.

    Args:
        config: the server's configuration.
        model_path: where the base model is.
        on_cpu: vLLM is the CPU build.
        head: IP address of the head, for a server over several nodes.

    Raises:
        ConfigError: `config.vllm` holds an argument that vLLM does not know, refuses, or that is set elsewhere.
    """
    extra = {key.replace("-", "_"): value for key, value in config.vllm.items()}
    _refuse(extra)
    nodes = {} if head is None else _nodes(config.parallel, head)
    return _parse({**_defaults(config, model_path, on_cpu), **nodes, **extra, **_FIXED})


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
        # Sampling parameters are the request's; a model's own defaults (top_k 20 ...) would be used in silence.
        "generation_config": "vllm",
        "disable_uvicorn_access_log": True,
    }
    if config.enable_lora:
        rank = next(rank for rank in _LORA_RANKS if rank >= config.max_lora_rank)
        values |= {"enable_lora": True, "max_loras": config.max_loras, "max_lora_rank": rank}
    if on_cpu:
        values |= {
            "dtype": "float32" if model.dtype == "auto" else model.dtype,
            "enforce_eager": model.enforce_eager is not False,
            "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
            "max_num_seqs": _CPU_MAX_NUM_SEQS,
            # A seeded request whose prompt is computed in chunks ends the engine (vLLM 0.32: its CPU generator cannot
            # be set back to the offset of the chunk before).
            "enable_chunked_prefill": False,
            "distributed_executor_backend": "uni" if forks_engines(config, on_cpu) else None,
        }
    return values


def _nodes(parallel: "ParallelConfig", head: str) -> dict[str, Any]:
    """What vLLM must know of a server over several nodes. The head says no start rank: vLLM would balance otherwise."""
    return {
        "data_parallel_size_local": parallel.copies_here,
        "data_parallel_address": head,
        "data_parallel_rpc_port": parallel.rpc_port,
        "data_parallel_start_rank": parallel.start_rank if parallel.headless else None,
    }


def _refuse(extra: Mapping[str, Any]) -> None:
    for key in extra:
        if key in _FIXED:
            raise ConfigError(f"vllm.{key}: is set by the server ({_FIXED[key]}) and cannot be changed; remove it")
        if key in _ELSEWHERE:
            raise ConfigError(f"vllm.{key}: set {_ELSEWHERE[key]} instead")
        if key in _UNSUPPORTED:
            raise ConfigError(f"vllm.{key}: not supported: {_UNSUPPORTED[key]}")


def _parse(values: Mapping[str, Any]) -> Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vllm: {message}")

    parser = make_arg_parser(Parser(add_help=False))
    flags = [flag for key, value in values.items() for flag in _flags(key, value, parser._option_string_actions)]
    arguments = parser.parse_args(flags)
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vllm: {error}") from None
    return arguments


def _flags(key: str, value: Any, known: Mapping[str, Any]) -> list[str]:
    """Spell one argument as vLLM's command line does."""
    flag = f"--{key.replace('_', '-')}"
    if flag not in known:
        raise ConfigError(f"vllm.{key}: vLLM's server has no such argument")
    if value is None:
        return []
    if isinstance(value, bool):
        off = f"--no-{key.replace('_', '-')}"
        return [flag] if value else [off] if off in known else []
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]
