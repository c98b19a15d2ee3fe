"""Keys of `uv run inference`."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, BaseConfig, RootConfig
from prime_rl.configs.shared import API_KEY_VAR, DEFAULT_MODEL, DEFAULT_PORT, LogConfig


class ServerConfig(BaseConfig):
    """Where the server listens."""

    host: str = "127.0.0.1"
    """Address to bind; 0.0.0.0 lets other machines in."""

    port: int = Field(DEFAULT_PORT, ge=1, le=65535)
    """Port to bind."""

    api_key_var: str = API_KEY_VAR
    """Name of the environment variable that holds the key every client must send; no key where it is unset."""


class InferenceModelConfig(BaseConfig):
    """The model as it is served."""

    name: str = DEFAULT_MODEL
    """Hugging Face id or local directory of the base model, policy version 0."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision; auto is the checkpoint's on CUDA and float32 on CPU."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt and completion together, tokens; None takes the model's own. `max_model_len` is short for it."""

    enforce_eager: bool | None = None
    """Skip graph capture and compilation: starts faster, decodes slower; None is true on CPU only."""

    trust_remote_code: bool = False
    """Run Python code that the model's repository brings along."""


class ParallelConfig(BaseConfig):
    """How the model is spread over GPUs: tp * dp of them."""

    tp: int = Field(1, ge=1)
    """GPUs that share one copy of the model (tensor parallel)."""

    dp: int = Field(1, ge=1)
    """Copies of the model (data parallel)."""


class InferenceConfig(RootConfig):
    """The inference server: vLLM's OpenAI server with routes to switch the policy."""

    command: ClassVar[str] = "inference"
    aliases: ClassVar[dict[str, str]] = {
        "max_model_len": "model.max_model_len",
        # What a person types on each node of a server that spans several.
        "data_parallel_address": "vllm.data_parallel_address",
        "data_parallel_rpc_port": "vllm.data_parallel_rpc_port",
        "data_parallel_start_rank": "vllm.data_parallel_start_rank",
    }

    server: ServerConfig = ServerConfig()
    """Where the server listens."""

    model: InferenceModelConfig = InferenceModelConfig()
    """The model."""

    parallel: ParallelConfig = ParallelConfig()
    """How the model is spread over GPUs."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that the server may take; leave room where the trainer shares the GPU."""

    seed: int = 0
    """Seed of the sampler, for requests that bring none."""

    lease_seconds: float = Field(30, gt=0)
    """Seconds after its last admin call until a run loses its lease of the server."""

    kv_on_switch: Literal["keep", "recompute"] = "keep"
    """KV cache of completions that a switch interrupts: kept, or computed anew by the new weights."""

    canary_tolerance: float | None = Field(None, gt=0)
    """How far our log-probabilities of a version's canary may be from the trainer's; more ends the run. None is 1e-4
    for the largest difference where both compute in float32, else 5e-2 for the mean difference."""

    vllm: dict[str, Any] = Field({})
    """Any further argument of vLLM's server, such as `vllm.max_num_seqs`."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Where `--dry-run` writes; the server itself keeps no state."""

    log: LogConfig = LogConfig()
    """The log."""

    @property
    def max_model_len(self) -> int | None:
        """`model.max_model_len`."""
        return self.model.max_model_len
