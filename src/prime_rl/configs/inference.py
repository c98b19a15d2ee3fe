"""Keys of `uv run inference`."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.configs.base import DEFAULT_OUTPUT_DIR, BaseConfig, RootConfig
from prime_rl.configs.shared import (
    API_KEY_VAR,
    DEFAULT_MODEL,
    DEFAULT_PORT,
    SERVER_ADDRESS_VAR,
    HeartbeatConfig,
    LogConfig,
)


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
    """How the model is spread over GPUs, tp * dp of them, and over nodes: docs/deployment.md."""

    tp: int = Field(1, ge=1)
    """GPUs that share one copy of the model (tensor parallel), on one node."""

    dp: int = Field(1, ge=1)
    """Copies of the model (data parallel), on all nodes together."""

    dp_local: int | None = Field(None, ge=1)
    """Copies on this node; None is all of them. Fewer than dp make a server over several nodes."""

    start_rank: int | None = Field(None, ge=0)
    """Number of this node's first copy; the head's is 0."""

    headless: bool = False
    """This node is not the head: it has no HTTP server, and runs its copies for the head at `address`."""

    address: str | None = None
    """Address of the head, for a server over several nodes."""

    rpc_port: int = Field(29550, ge=1, le=65535)
    """Port of the head that the other nodes come to; engines choose further ones."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Longest wait of nodes for each other, seconds."""

    @property
    def copies_here(self) -> int:
        """Copies of the model on this node."""
        return self.dp_local or self.dp

    @property
    def spans_nodes(self) -> bool:
        """Whether there are other nodes."""
        return self.headless or self.copies_here < self.dp

    @model_validator(mode="after")
    def _check(self) -> "ParallelConfig":
        if self.headless and (self.dp_local is None or not self.start_rank):
            raise ValueError(
                "headless needs start_rank and dp_local: which copies of the model this node runs; the head runs the "
                "first ones"
            )
        if self.spans_nodes and self.address is None:
            raise ValueError(
                "address is missing: a server over several nodes needs that of its head on all of them "
                "(--parallel.address, or the environment variable DATA_PARALLEL_ADDRESS)"
            )
        first = self.start_rank or 0 if self.headless else 0
        if first + self.copies_here > self.dp:
            raise ValueError(f"dp_local = {self.copies_here} copies from {first} on are more than dp = {self.dp}")
        return self


class InferenceConfig(RootConfig):
    """The inference server: vLLM's OpenAI server with routes to switch the policy."""

    command: ClassVar[str] = "inference"
    aliases: ClassVar[dict[str, str]] = {
        "max_model_len": "model.max_model_len",
        # vLLM's names, as a person types them on each node of a server that spans several.
        "tensor_parallel_size": "parallel.tp",
        "data_parallel_size": "parallel.dp",
        "data_parallel_size_local": "parallel.dp_local",
        "data_parallel_start_rank": "parallel.start_rank",
        "data_parallel_address": "parallel.address",
        "data_parallel_rpc_port": "parallel.rpc_port",
        "headless": "parallel.headless",
    }
    variables: ClassVar[dict[str, str]] = {
        **RootConfig.variables,
        SERVER_ADDRESS_VAR: "server.host",
        "DATA_PARALLEL_ADDRESS": "parallel.address",
        "DATA_PARALLEL_RPC_PORT": "parallel.rpc_port",
    }

    server: ServerConfig = ServerConfig()
    """Where the server listens."""

    model: InferenceModelConfig = InferenceModelConfig()
    """The model."""

    parallel: ParallelConfig = ParallelConfig()
    """How the model is spread over GPUs and nodes."""

    heartbeat: HeartbeatConfig = HeartbeatConfig()
    """How a node that was lost, or an engine that hangs, is noticed where no connection tells."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that the server may take; leave room where the trainer shares the GPU."""

    enable_lora: bool = False
    """Take versions that are adapters (`trainer.model.lora.publish = adapter`), and serve others under names. `rl` sets
    it where its trainer publishes adapters."""

    max_loras: int = Field(4, ge=1)
    """Adapters that are served at once, the policy's among them."""

    max_lora_rank: int = Field(16, ge=1, le=512)
    """Largest rank of an adapter."""

    seed: int = 0
    """Seed of the sampler, for requests that bring none."""

    lease_seconds: float = Field(30, gt=0)
    """Seconds after its last admin call until a run loses its lease of the server."""

    engine_timeout: float = Field(300, gt=0)
    """Longest time in which the engines may answer nothing, seconds, before they count as stuck: one step is that long,
    on a CPU with a long prompt for example."""

    kv_on_switch: Literal["keep", "recompute"] = "keep"
    """KV cache of completions that a switch interrupts: kept, or computed anew by the new weights."""

    pin_seconds: float = Field(60, ge=0)
    """Longest time that a switch waits for chat completions, whose tokens carry no versions; 0 waits for none."""

    canary_tolerance: float | None = Field(None, gt=0)
    """How far our log-probabilities of a version's canary may be from the trainer's; more ends the run. None is 1e-4
    for the largest difference where both compute in float32, else 5e-2 for the mean difference."""

    weights_cache: Path | None = None
    """Folder on this node for the newest version in full, where versions are published as deltas (docs/delta.md); None
    is the system's temporary folder."""

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
