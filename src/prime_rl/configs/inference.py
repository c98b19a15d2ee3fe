"""Keys of `uv run inference`."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.base_model import NameConfig
from prime_rl.configs.client import DEFAULT_PORT, SERVER_ADDRESS_VAR
from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.configs.lists import StrList
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.logging import LogConfig
from prime_rl.configs.training.broadcast import Precision
from prime_rl.configs.vllm_arguments import PARALLEL, refusal_reason
from prime_rl.core.api_key import API_KEY_VAR, RELAY_KEY_VAR


class ServerConfig(BaseConfig):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to bind; 0.0.0.0 accepts connections from other machines."""

    port: int = Field(DEFAULT_PORT, ge=1, le=65535, json_schema_extra=common("Inference"))
    """Port to bind."""

    api_key_var: str = API_KEY_VAR
    """Environment variable with the API key that clients must send; no key is required if it is unset."""


class InferenceModelConfig(NameConfig):
    """The served model."""

    dtype: Precision = "auto"
    """Precision; auto is the checkpoint's precision on CUDA and float32 on CPU."""

    max_model_len: int | None = Field(None, ge=1, json_schema_extra=common("Model"))
    """Maximum tokens of prompt and completion; None uses the model's limit."""

    enforce_eager: bool | None = None
    """Disable graph capture and compilation: starts faster, decodes slower; None disables them on CPU only."""

    trust_remote_code: bool = False
    """Run Python code from the model's repository."""


class ParallelConfig(BaseConfig):
    """Distribution of the model over tp * dp GPUs and over nodes (docs/deployment.md)."""

    tp: int = Field(1, ge=1, json_schema_extra=common("Inference"))
    """Tensor parallelism: GPUs of one node that share one copy of the model."""

    dp: int = Field(1, ge=1, json_schema_extra=common("Inference"))
    """Data parallelism: copies of the model on all nodes."""

    dp_local: int | None = Field(None, ge=1)
    """Copies on this node; None is all. Less than dp configures a server over several nodes."""

    start_rank: int | None = Field(None, ge=0)
    """Rank of this node's first copy; 0 on the head."""

    headless: bool = False
    """Run copies for the head at `address`, without an HTTP server on this node."""

    address: str | None = None
    """Address of the head of a server over several nodes."""

    rpc_port: int = Field(29550, ge=1, le=65535)
    """Port of the head to which the other nodes connect; engines open further ones."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Timeout of the nodes while they wait for each other."""

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
                "headless needs start_rank and dp_local: the copies of the model on this node; the head runs the "
                "first ones"
            )
        if self.spans_nodes and self.address is None:
            raise ValueError(
                "address is missing: a server over several nodes needs that of its head on all of them "
                "(--parallel.address, or the environment variable DATA_PARALLEL_ADDRESS)"
            )
        if self.start_rank and not self.headless:
            raise ValueError(
                f"start_rank = {self.start_rank} is for a node without an HTTP server: add --headless; the head runs "
                "the first copies, from 0"
            )
        first = self.start_rank or 0
        if first + self.copies_here > self.dp:
            raise ValueError(f"dp_local = {self.copies_here} copies from {first} on are more than dp = {self.dp}")
        return self


class RelaySourceConfig(BaseConfig):
    """Relays from which the server copies the policy versions that it is asked to load (docs/deployment.md)."""

    urls: StrList = Field([])
    """URLs such as http://node1:8430, separated by commas; all have the same versions."""

    api_key_var: str = RELAY_KEY_VAR
    """Environment variable with the key of the relays; no key is sent if it is unset."""

    timeout_seconds: float = Field(300, gt=0)
    """Reject a version after this many seconds without a new byte from any relay."""

    @model_validator(mode="after")
    def _check(self) -> "RelaySourceConfig":
        if not self.urls:
            raise ValueError("urls is missing: the URLs of relays, such as --relay.urls http://node1:8430")
        return self


class InferenceConfig(RootConfig):
    """The inference server: vLLM's OpenAI server with routes for weight updates.

    It writes a heartbeat to output_dir, if that is a run directory.
    """

    command_name: ClassVar[str] = "inference"
    aliases: ClassVar[dict[str, str]] = {
        "max_model_len": "model.max_model_len",
        **PARALLEL,
    }
    deprecated: ClassVar[dict[str, str]] = {
        "engine_timeout": "engine_timeout_seconds",
        "vllm.revision": "model.revision",
        "kv_on_switch": "kv_cache_on_weight_update",
        "pin_seconds": "pin_timeout_seconds",
    }
    variables: ClassVar[dict[str, str]] = {
        SERVER_ADDRESS_VAR: "server.host",
        "DATA_PARALLEL_ADDRESS": "parallel.address",
        "DATA_PARALLEL_RPC_PORT": "parallel.rpc_port",
    }

    server: ServerConfig = Field(default_factory=ServerConfig)
    """The HTTP server."""

    model: InferenceModelConfig = Field(default_factory=InferenceModelConfig)
    """The served model."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Distribution of the model over GPUs and nodes."""

    heartbeat: HeartbeatConfig = Field(default_factory=HeartbeatConfig)
    """Detection of lost nodes and unresponsive engines."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, json_schema_extra=common("Inference"))
    """Share of each GPU's memory for the server; lower it if the trainer uses the same GPU."""

    enable_lora: bool = False
    """Accept versions that are adapters (`trainer.model.lora.publish = adapter`), of several runs at the same time, and
    serve further named adapters. `rl` sets it if its trainer publishes adapters."""

    max_loras: int = Field(4, ge=1)
    """Maximum number of loaded adapters: those of runs (slots), and named ones."""

    max_lora_rank: int = Field(16, ge=1, le=512)
    """Maximum rank of an adapter."""

    enable_return_routed_experts: bool = False
    """Return the experts of each token, which a trainer with `model.router_replay` needs; `rl` sets it for one."""

    seed: int = Field(0, ge=0)
    """Seed of the sampler for requests without a seed."""

    lease_seconds: float = Field(30, gt=0)
    """A run loses its lease of the server this long after its last admin request."""

    engine_timeout_seconds: float = Field(300, gt=0)
    """Treat the engines as unresponsive after this time without an answer or in a paused state. It must exceed one
    step, for example a long prompt on a CPU. Also the timeout of the server's own first request."""

    kv_cache_on_weight_update: Literal["keep", "recompute"] = "keep"
    """KV cache of completions that a weight update interrupts: keep it, or recompute it with the new weights."""

    pin_timeout_seconds: float = Field(60, ge=0)
    """Longest delay of a weight update by chat completions, whose tokens have no version; 0 does not delay it."""

    canary_tolerance: float | None = Field(None, gt=0)
    """Tolerated difference from the trainer's canary log-probabilities; a larger one fails the run. None is 1e-4 for
    the maximum difference or 1e-5 for the mean if both compute in float32, else 5e-2 for the mean difference, or three
    times the mean difference of the base model."""

    weights_cache: Path | None = None
    """Local directory for the latest full version if versions are published as deltas (docs/design/deltas.md); None is
    the temporary directory of the system."""

    relay: RelaySourceConfig | None = None
    """Copy versions from relays instead of reading a shared directory."""

    vllm: dict[str, Any] = Field({}, json_schema_extra=common("Inference"))
    """Further arguments of vLLM's server, such as `vllm.max_num_seqs`."""

    log: LogConfig = Field(default_factory=LogConfig)
    """The log."""

    @model_validator(mode="after")
    def _check(self) -> "InferenceConfig":
        if self.relay is not None and self.parallel.spans_nodes:
            raise ValueError("relay: a server over several nodes needs a directory that its nodes share; remove relay")
        if drafts := self.vllm.get("speculative_config"):
            others = {
                "enable_return_routed_experts": self.enable_return_routed_experts,
                "enable_lora": self.enable_lora and drafts["method"] == "draft_model",
                "vllm.return_sampling_mask": self.vllm.get("return_sampling_mask"),
            }
            for key in (name for name, value in others.items() if value):
                raise ValueError(f"vllm.speculative_config: not tested with {key} = true; leave one of them out")
        return self

    @field_validator("vllm", mode="after")
    @classmethod
    def _check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        # If both spellings are given, the stronger source's comes last and is used.
        arguments = {key.replace("-", "_"): argument for key, argument in value.items()}
        for key, argument in arguments.items():
            if reason := refusal_reason(key, argument):
                raise ValueError(f"{key}: {reason}")
        return arguments

    @property
    def max_model_len(self) -> int | None:
        """`model.max_model_len`, as documented upstream."""
        return self.model.max_model_len
