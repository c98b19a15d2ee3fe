"""Keys of `uv run tinker-server`."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.logging import LogConfig
from prime_rl.configs.training.model import ALL_LINEAR, LoRAConfig, TrainerModelConfig

KEY_VAR = "TINKER_SERVER_API_KEY"
"""Default of `server.api_key_var`."""


class TinkerApiConfig(BaseConfig):
    """The HTTP server for Tinker's SDK."""

    host: str = "127.0.0.1"
    """Address; another one than the loopback interface needs an API key."""

    port: int = Field(8600, ge=1, le=65535, json_schema_extra=common("Run"))
    """Port."""

    api_key_var: str = KEY_VAR
    """Environment variable with the key that clients must send as TINKER_API_KEY. It begins with tml-. Without a key,
    the server accepts any that does."""

    session_timeout_seconds: float = Field(120, gt=0)
    """A session whose client has sent nothing for so long ends, and its models leave the trainer. The SDK sends a sign
    of life every 10 s."""

    gap_timeout_seconds: float = Field(60, gt=0)
    """How long operations of a model wait for an earlier one that has not arrived. Then they fail."""


class TinkerConfig(RootConfig):
    """A server for Tinker's SDK: training and sampling of LoRA adapters of one model."""

    command_name: ClassVar[str] = "tinker-server"
    aliases: ClassVar[dict[str, str]] = {"host": "server.host", "port": "server.port"}

    server: TinkerApiConfig = Field(default_factory=TinkerApiConfig)
    """The HTTP server."""

    model: TrainerModelConfig = Field(default_factory=TrainerModelConfig)
    """The base model, and how its ranks are laid out. `model.seq_len` limits a sample."""

    aliases_of_model: dict[str, str] = Field({})
    """Further names by which clients may ask for the model, such as "Qwen/Qwen3-8B" = "path/of/small/model". With
    "Qwen/*" or "*" it stands for all such names, and each client gets a message that says so."""

    aliases_of_losses: dict[str, Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]] = Field({})
    """Further names of losses, such as stable_reinforce = "importance_sampling", whose own formula is not public. Each
    client gets a message that lists them."""

    max_rank: int = Field(32, ge=1, le=512, json_schema_extra=common("Training"))
    """Largest rank of an adapter."""

    ranks: int = Field(1, ge=1, json_schema_extra=common("GPUs"))
    """Trainer ranks; one per GPU."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The inference server. It samples from `inference.max_loras` adapters at the same time."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer."""

    dist_timeout_seconds: float = Field(600, gt=0)
    """Time limit of collectives of the ranks."""

    log: LogConfig = Field(default_factory=LogConfig)
    """Logging."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "" in self.aliases_of_model:
            raise ValueError("aliases_of_model: a name is empty; remove it")
        for name, target in self.aliases_of_model.items():
            if target != self.model.name:
                raise ValueError(
                    f"aliases_of_model: {name!r} = {target!r}, but this server has the model {self.model.name!r}"
                )
        if self.model.tp > 1 or self.model.cp is not None or self.model.ep > 1:
            raise ValueError("model.tp, model.cp and model.ep are not supported with several adapters")
        if self.model.router_replay:
            raise ValueError("model.router_replay is not supported: clients send no routed experts; set it to false")
        return self

    @property
    def socket(self) -> Path:
        """Unix socket on which the HTTP server waits for the trainer."""
        return self.output_dir / "tinker.sock"

    @property
    def trained_model(self) -> TrainerModelConfig:
        """The model with room for adapters of the largest rank on all linear layers."""
        lora = LoRAConfig(rank=self.max_rank, target_modules=[ALL_LINEAR], publish="adapter")
        return self.model.model_copy(update={"lora": lora})

    @property
    def served_model(self) -> InferenceConfig:
        """The inference server's configuration."""
        same = ("name", "revision", "download_timeout_seconds")
        model: dict[str, Any] = {key: getattr(self.model, key) for key in same}
        model["max_model_len"] = self.model.seq_len
        shared = {"enable_lora": True, "max_lora_rank": max(8, self.max_rank), "output_dir": self.output_dir}
        inference = self.inference.model_copy(update=shared)
        return inference.model_copy(update={"model": inference.model.model_copy(update=model)})
