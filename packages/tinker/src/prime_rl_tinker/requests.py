"""Bodies of the JSON requests of Tinker's SDK. A field that is not honoured is refused by its type."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """A request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str | None = None  # the SDK repeats the name of the request


class CreateSession(Body):
    """Body of create_session. Metadata and name are kept as long as the session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Body):
    """Body of session_heartbeat."""

    session_id: str


class LoraConfig(Body):
    """Layers and rank of an adapter."""

    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """Only AdamW."""

    type: Literal["adamw"] = "adamw"


class CreateModelBody(Body):
    """Body of create_model."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    lora_config: LoraConfig
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: dict[str, Any] | None = None


class ModelBody(Body):
    """Body of get_info and unload_model."""

    model_id: str


class AdamParams(Body):
    """Hyperparameters of one step."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0, allow_inf_nan=False)  # 0 / 0 where a gradient is 0
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class OptimStepBody(Body):
    """Body of optim_step."""

    model_id: str
    seq_id: int = Field(ge=1)
    adam_params: AdamParams


class SaveBody(Body):
    """Body of save_weights."""

    model_id: str
    path: str
    seq_id: int = Field(ge=1)
    ttl_seconds: float | None = Field(None, gt=0)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSamplerBody(Body):
    """Body of save_weights_for_sampler."""

    model_id: str
    seq_id: int = Field(ge=1)
    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: float | None = Field(None, gt=0)
    user_metadata: dict[str, str] | None = None


class LoadBody(Body):
    """Body of load_weights, into a model or creating one."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: dict[str, Any] | None = None
    weights_access_token: None = None


class CreateSamplingSessionBody(Body):
    """Body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    """Tokens of a prompt; images and sound are refused."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class ModelInput(Body):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """How to sample; None for `stop` ends at the model's end token, [] only at `max_tokens`."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(Body):
    """Body of asample."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(1, ge=1)
    sampling_session_id: str | None = None
    seq_id: int | None = Field(None, ge=0)
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: None = None
    record_stability_info: bool | None = None  # with an alias of stable_reinforce, which needs no information


class FutureBody(Body):
    """Body of retrieve_future and cancel_future. A result is always answered whole."""

    request_id: str
    allow_metadata_only: bool = False


class PathBody(Body):
    """Body of weights_info."""

    tinker_path: str


class TtlBody(Body):
    """Body of .../ttl."""

    ttl_seconds: float | None = Field(gt=0)
