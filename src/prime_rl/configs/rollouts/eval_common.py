"""Blocks of commands that run environments without training: `eval`, `orchestrator.eval`, `synthesize`."""

from collections.abc import Iterator
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.rollouts.options import RolloutsConfig
from prime_rl.configs.shared.blocks import ClientConfig, EnvConfig, LogConfig
from prime_rl.loading.base_config import common

Api = Literal["generate", "chat"]


class AnyServerConfig(ClientConfig):
    """The server of the model: `inference`, or any server with an OpenAI-compatible API."""

    api: Literal["auto", "generate", "chat"] = "auto"
    """generate requests tokens from `inference`, chat requests messages from any OpenAI-compatible server; auto chooses
    generate if the server has the route /policy."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `reconnect_seconds`, which only the orchestrator uses."""
        yield from super().without_effect()
        yield "reconnect_seconds", "has no effect here; client.timeout_seconds limits each request"

    def chat_url(self, index: int) -> str:
        """Return the base URL of a server's OpenAI routes; `/v1` is added to a URL without a path."""
        if self.base_url is None:
            return f"{self.urls[index]}/v1"
        given = self.base_url[index].rstrip("/")
        return given if urlsplit(given).path else f"{given}/v1"


_OF_TRAINING = {"weight", "rollouts_per_example", "max_concurrent", "max_rollouts_per_minute"}


class EvalEnvConfig(EnvConfig):
    """An environment, and how much of it to run."""

    weight: float = Field(1.0, gt=0)
    """Only for training, as the share of an environment; other values are rejected here."""

    num_examples: int | None = Field(None, ge=-1)
    """Examples of this environment; -1 is all, None uses the value for all environments."""

    rollouts_per_example: int | None = Field(None, ge=1)
    """Rollouts of each example; None uses the value for all environments."""

    @field_validator("weight")
    @classmethod
    def _is_default(cls, weight: float) -> float:
        if weight != cls.model_fields["weight"].default:
            raise ValueError("weight is a share in training; env.num_examples sets how many examples run")
        return weight

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report limits of training."""
        for key in ("max_concurrent", "max_rollouts_per_minute"):
            yield key, "limits training only; max_concurrent without env limits an evaluation"

    @classmethod
    def from_training(cls, env: EnvConfig) -> Self:
        """Return the keys of a training environment, without those of its groups."""
        return cls.model_validate(env.model_dump(exclude=_OF_TRAINING))

    def as_env_config(self) -> EnvConfig:
        """Return the keys of the environment itself."""
        return EnvConfig.model_validate(self.model_dump(include=set(EnvConfig.model_fields)))


class EvaluationConfig(RolloutsConfig):
    """Keys of `eval` and `synthesize`."""

    client: AnyServerConfig = Field(default_factory=AnyServerConfig)
    """The server of the model."""

    env: list[EvalEnvConfig] = Field([])
    """Environments to run; one table is a list of one."""

    num_examples: int = Field(-1, ge=-1, json_schema_extra=common("Rollouts"))
    """Examples per environment; -1 is all."""

    rollouts_per_example: int = Field(1, ge=1, json_schema_extra=common("Rollouts"))
    """Rollouts n of each example; `eval` reports pass@k for k up to n."""

    seq_len: int = Field(2048, ge=2, json_schema_extra=common("Model"))
    """Maximum tokens of prompt and completion; unused if the server renders the prompts."""

    max_concurrent: int | None = Field(256, ge=1, json_schema_extra=common("Rollouts"))
    """Maximum number of rollouts in flight; None sets no limit."""

    log: LogConfig = Field(default_factory=LogConfig)
    """The log."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        for env in self.env:
            env.sampling_with(self.sampling)  # raises ValueError for an invalid override
        return self
