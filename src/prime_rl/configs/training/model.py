"""`trainer.model` and `sft.model`: the trained model, its parallelism, its memory options and LoRA."""

import math
import re
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.base_model import NameConfig
from prime_rl.configs.lists import StrList
from prime_rl.configs.loading.base_config import BaseConfig, common


class CompileConfig(BaseConfig):
    """torch.compile of each transformer block."""

    fullgraph: bool = False
    """Fail if a block does not compile as one graph."""


class ActivationCheckpointConfig(BaseConfig):
    """Recompute activations in the backward pass instead of storing them."""

    mode: Literal["full", "selective"] = "full"
    """full stores only a block's input; selective also stores the results of attention and matrix products."""

    freq: int = Field(1, ge=1)
    """Recompute every n-th block; 1 saves most memory."""


class ActivationOffloadConfig(BaseConfig):
    """Store the saved tensors of the blocks in host memory until the backward pass."""

    pin_memory: bool = True
    """Use page-locked host memory, so that copies overlap with computation (CUDA only)."""

    max_inflight_activations: int = Field(5, ge=1)
    """Maximum number of concurrent copies: more hide the copies better and use more GPU memory."""


ALL_LINEAR, EXPERTS = "all-linear", "experts"
DEFAULT_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoRAConfig(BaseConfig):
    """Train low-rank adapters and freeze all other weights."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(32.0, gt=0)
    """Scale; an adapter's product is multiplied by alpha / rank."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter while gradients are computed. With a value above 0 the trained policy differs from the
    sampling one; mismatch_kl measures the difference."""

    target_modules: StrList = Field(DEFAULT_TARGETS)
    """Linear layers with an adapter: last parts of their names, regular expressions for the whole name, or `all-linear`
    (all but the output head); `experts` is each expert of a mixture. Default names that the model does not have are
    ignored."""

    base_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the frozen weights; auto is the precision of forward and backward. Adapters use float32."""

    publish: Literal["merged", "adapter"] = "merged"
    """Publish all weights with the adapters merged into them, or the adapters alone in peft's format, for a server with
    `enable_lora`."""

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if EXPERTS in self.target_modules:
            if self.publish == "adapter":
                raise ValueError("target_modules: adapters of experts are published merged; set publish = 'merged'")
            if self.rank % 8:  # grouped matrix products need rows of 16 bytes
                raise ValueError(f"rank = {self.rank}: adapters of experts need a multiple of 8")
        return self

    @property
    def scale(self) -> float:
        """Factor of the adapter's product: alpha / rank."""
        return self.alpha / self.rank

    @field_validator("target_modules")
    @classmethod
    def _compiles(cls, targets: list[str]) -> list[str]:
        if not targets:
            raise ValueError(f"target_modules is empty; name linear layers, or {ALL_LINEAR}")
        for target in targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(
                    f"target_modules: {target!r} is neither a name nor a regular expression: {error}"
                ) from None
        return targets


class ContextParallelConfig(BaseConfig):
    """Split each sequence over several ranks."""

    shorthand: ClassVar[str | None] = "degree"

    degree: int = Field(2, ge=1)
    """Ranks that share one sequence."""


class DebugModelConfig(BaseConfig):
    """Changes of the model for quick tests."""

    num_layers: int | None = Field(None, ge=1)
    """Keep only the first layers; None keeps all."""

    random_init: bool = False
    """Use random weights; only the config and the tokenizer are loaded."""


class TrainerModelConfig(NameConfig):
    """The trained model."""

    deprecated: ClassVar[dict[str, str]] = {"download_timeout": "download_timeout_seconds"}

    seq_len: int = Field(2048, ge=1, json_schema_extra=common("Model"))
    """Maximum tokens of one forward pass, into which rows are concatenated. At least the orchestrator's seq_len."""

    max_model_len: int | None = Field(None, ge=1)
    """Maximum sequence length of inference, which selects the short or long frequencies of longrope models, as in vLLM.
    Under `rl` it is inference's; None is vLLM's default (in `sft`, data.seq_len)."""

    impl: Literal["auto", "hf", "liger_kernel"] = "auto"
    """Implementation: transformers (hf and auto), or fused kernels for norms and MLPs (CUDA, liger-kernel)."""

    attn: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel; auto is varlen, with FlashAttention-3 on Hopper GPUs if it is installed."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of forward and backward; auto is bfloat16 on CUDA and float32 on CPU."""

    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the gradient reduction over ranks."""

    reduce_gradients_once: bool = False
    """Reduce gradients once per minibatch instead of once per row: less communication, but every rank stores full
    gradients until then, 4 bytes per parameter."""

    compile: CompileConfig | None = Field(None, json_schema_extra=common("Memory and parallelism"))
    """torch.compile; None runs eagerly. Recommended on GPUs (docs/scaling.md)."""

    ac: ActivationCheckpointConfig | None = Field(None, json_schema_extra=common("Memory and parallelism"))
    """Activation checkpointing; None stores all activations, which rarely fit on GPUs (docs/scaling.md)."""

    ac_offloading: ActivationOffloadConfig | None = None
    """Store the blocks' saved tensors in host memory until the backward pass; None stores them on the device."""

    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and update them there; not with Muon."""

    optim_cpu_offload: bool = False
    """Keep the optimizer state in host memory, and copy it to the device in parts for the update."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass: less memory, one more all-gather."""

    reshard_ranks: int | None = Field(None, ge=2)
    """Between the passes, shard over groups of this many ranks only, such as those of a node; None is all ranks."""

    trust_remote_code: bool = False
    """Run Python code from the model's repository."""

    logprob_chunk_size: int | None = Field(None, ge=1)
    """Tokens of a row whose logits exist at the same time; less saves memory. None is what 1 GiB holds (64 MiB on a
    CPU)."""

    dp_replicate: int = Field(1, ge=1)
    """Copies of the sharded model (hybrid sharding); weights are gathered within a copy."""

    tp: int = Field(1, ge=1, json_schema_extra=common("Memory and parallelism"))
    """Tensor parallelism: ranks that share each matrix of the blocks."""

    ep: int = Field(1, ge=1)
    """Expert parallelism: number of ranks that share the experts of each layer; divides the sharding ranks."""

    cp: ContextParallelConfig | None = Field(None, json_schema_extra=common("Memory and parallelism"))
    """Context parallelism: ranks that share each row, for rows that are too long for one; None uses whole rows."""

    lora: LoRAConfig | None = Field(None, json_schema_extra=common("Memory and parallelism"))
    """Train a LoRA adapter; None trains all weights."""

    router_replay: bool = False
    """Mixtures of experts: train each token with the experts that the sampler chose for it (router replay, R3). The
    inference server needs enable_return_routed_experts."""

    debug: DebugModelConfig = Field(default_factory=DebugModelConfig)
    """Shrink or randomise the model for quick tests."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cp is not None and self.attn not in ("auto", "varlen"):
            raise ValueError(f"cp: attention {self.attn!r} would see one slice of a row; set model.attn='varlen'")
        if self.router_replay and self.compile is not None:
            raise ValueError("router_replay does not support compile; remove model.compile, or set it to false")
        if self.lora is not None and self.tp > 1:
            raise ValueError(f"lora does not support tp = {self.tp}: an adapter cannot be divided; set model.tp=1")
        return self

    def sharding_ranks(self, ranks: int) -> int:
        """Return how many of `ranks` ranks shard one copy of the model and train on different rows.

        Raises:
            ValueError: the ranks cannot be divided by the configured degrees.
        """
        cp = self.cp.degree if self.cp else 1
        factors = {"dp_replicate": self.dp_replicate, "cp": cp, "tp": self.tp}
        product = math.prod(factors.values())
        if ranks % product:
            asked = [f"model.{name} {factor}" for name, factor in factors.items() if factor > 1]
            what = " x ".join(asked) + (f" = {product}" if len(asked) > 1 else "")
            raise ValueError(f"{what} does not divide the {ranks} ranks; start a multiple of {product}")
        shard = ranks // product
        if self.ep > 1 and (self.ep % cp or (shard * cp) % self.ep):
            raise ValueError(
                f"model.ep {self.ep} must be a multiple of model.cp {cp} and divide the {shard * cp} ranks that "
                "shard one copy of the model"
            )
        if self.reshard_ranks is not None and (shard * cp) % self.reshard_ranks:
            raise ValueError(
                f"model.reshard_ranks {self.reshard_ranks} does not divide the {shard * cp} ranks that shard one copy "
                "of the model"
            )
        return shard
