"""Keys of `uv run trainer`."""

import math
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig, RootConfig, later
from prime_rl.configs.bench import STEPS, shorten, use_fake_data
from prime_rl.configs.broadcast import check_transfer
from prime_rl.configs.lora import LoRAConfig
from prime_rl.configs.loss import AIPOLossConfig, LossConfig, ReferenceConfig
from prime_rl.configs.memory import (
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    check_memory,
)
from prime_rl.configs.optim import AdamWConfig, ConstantSchedulerConfig, OptimConfig, SchedulerConfig, check_schedule
from prime_rl.configs.shared import (
    DEFAULT_MODEL,
    BroadcastConfig,
    CkptConfig,
    FileBroadcastConfig,
    HeartbeatConfig,
    LogConfig,
    Monitored,
    TokenizerConfig,
    WandbConfig,
)


class ContextParallelConfig(BaseConfig):
    """Split each sequence over several ranks."""

    shorthand: ClassVar[str | None] = "degree"

    degree: int = Field(2, ge=1)
    """Ranks that share one sequence."""


class DebugModelConfig(BaseConfig):
    """Changes to the model that make a quick test."""

    num_layers: int | None = Field(None, ge=1)
    """Keep only the first layers; None keeps all."""

    random_init: bool = False
    """Draw random weights instead of loading them; only config and tokenizer are read."""


class TrainerModelConfig(BaseConfig):
    """The model as it is trained."""

    name: str = DEFAULT_MODEL
    """Hugging Face id or local directory of the base model."""

    seq_len: int = Field(2048, ge=1)
    """Most tokens in one forward pass: rows are laid together up to it. At least the orchestrator's seq_len."""

    impl: Literal["auto", "hf", "liger_kernel"] = "auto"
    """Implementation: transformers' own (hf and auto), or fused kernels for norms and MLPs (CUDA, liger-kernel)."""

    attn: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel; auto takes the fastest that keeps packed segments apart exactly."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of forward and backward; auto is bfloat16 on CUDA and float32 on CPU."""

    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision in which gradients are summed over ranks."""

    compile: CompileConfig | None = None
    """torch.compile; None runs eagerly."""

    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing; None keeps all activations."""

    ac_offloading: ActivationOffloadConfig | None = None
    """Keep what blocks save for the backward pass in host memory; None keeps it on the device."""

    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and update them there; not with Muon."""

    optim_cpu_offload: bool = False
    """Keep the optimizer's state in host memory, and bring it to the device a part at a time for the update."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass; less memory, one more gather."""

    reshard_ranks: int | None = Field(None, ge=2)
    """Shard them between the passes over groups of so many ranks only, say those of a node; None shards over all."""

    trust_remote_code: bool = False
    """Run Python code that the model's repository brings along."""

    download_timeout: float = Field(3600, gt=0)
    """Longest time to download the model, or to wait for another process of this node that does, seconds."""

    logprob_chunk_size: int | None = Field(None, ge=1)
    """Tokens of a row whose logits exist at the same time; smaller saves memory. None: as many as 256 MiB hold."""

    dp_replicate: int = Field(1, ge=1)
    """Copies of the sharded model (hybrid sharding); weights are gathered inside a copy only."""

    tp: int = Field(1, ge=1)
    """Tensor parallelism: ranks that share each matrix of the blocks."""

    ep: int = Field(1, ge=1)
    """Expert parallelism: ranks, out of those that shard the model, that share the experts of each layer."""

    cp: ContextParallelConfig | None = None
    """Context parallelism: ranks share each row, for rows too long for one; None gives each rank whole rows."""

    lora: LoRAConfig | None = None
    """Train a LoRA adapter; None trains all weights."""

    debug: DebugModelConfig = DebugModelConfig()
    """Shrink or randomise the model for a quick test."""

    @model_validator(mode="after")
    def _parallelism_fits(self) -> "TrainerModelConfig":
        if self.cp is not None and self.attn not in ("auto", "varlen"):
            raise ValueError(f"cp: attention {self.attn!r} would see one slice of a row; set model.attn='varlen'")
        if self.lora is not None and self.tp > 1:
            raise ValueError(f"lora does not go with tp = {self.tp}: an adapter cannot be divided; set model.tp=1")
        return self

    def sharding_ranks(self, ranks: int) -> int:
        """Ranks that shard one copy of the model and have rows of their own, where there are `ranks` in all.

        Raises:
            ValueError: they cannot be divided as the other keys ask for.
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


class FakeDataConfig(BaseConfig):
    """Random batches instead of the orchestrator's, for tests and benchmarks."""

    batch_size: int = Field(8, ge=1)
    """Rollouts in a batch."""

    seq_len: int = Field(128, ge=2)
    """Tokens of a rollout."""

    micro_batch_size: int = Field(8, ge=1)
    """Rollouts packed into one row; a row holds at most model.seq_len tokens."""

    generate_samples: bool = False
    """Draw rollouts of different lengths instead of full ones."""


class TrainerDataConfig(BaseConfig):
    """Where batches come from."""

    fake: FakeDataConfig | None = None
    """Random batches; None waits for the orchestrator's."""


class PeerWandbConfig(BaseConfig):
    """The orchestrator's W&B run."""

    id: str | None = None
    """Id of the orchestrator's run."""


class PeerConfig(BaseConfig):
    """Keys of the orchestrator."""

    aliases: ClassVar[dict[str, str]] = Monitored

    wandb: PeerWandbConfig | None = None
    """The orchestrator's W&B run."""


class TrainerConfig(RootConfig):
    """The trainer: waits for batch n, trains v_n on it, publishes v_{n+1}."""

    command: ClassVar[str] = "trainer"
    aliases: ClassVar[dict[str, str]] = Monitored

    model: TrainerModelConfig = TrainerModelConfig()
    """The model."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer that is published with the weights."""

    optim: OptimConfig = AdamWConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """Learning rate over the steps."""

    loss: LossConfig = AIPOLossConfig()
    """The loss; see docs/losses.md."""

    reference: ReferenceConfig | None = None
    """Reference model of `loss.kl` and of distillation; None loads the base model where a penalty needs it."""

    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch, all against the sampler's logprobs; published after the last."""

    data: TrainerDataConfig = TrainerDataConfig()
    """Where batches come from."""

    weight_broadcast: BroadcastConfig = FileBroadcastConfig()
    """How weights reach inference."""

    ckpt: CkptConfig | None = None
    """Checkpoints of the trainer; None writes none."""

    keep_batches: bool = False
    """Keep the rows of all batches in rollouts/, to train on them again; else those go that no checkpoint needs."""

    max_steps: int | None = Field(None, ge=1)
    """Steps to train; None goes on for ever."""

    async_level: int = Field(2, ge=0)
    """Bound k on staleness, steps; the same as the orchestrator's."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto is cuda where there is one."""

    seed: int = 42
    """Seed of random weights and fake data."""

    wait_timeout_seconds: float = Field(1800, gt=0)
    """Longest wait for a batch, seconds."""

    visibility_seconds: float | None = Field(None, ge=0)
    """How long files of what the others write may take to be seen whole, before they count as damaged, seconds; None is
    0 on a local disk and 60 on a network file system."""

    dist_timeout_seconds: float = Field(600, gt=0)
    """Longest wait of one rank for another, seconds."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None writes only metrics/trainer.jsonl."""

    log: LogConfig = LogConfig()
    """The log."""

    orchestrator: PeerConfig | None = later(None, because="has no effect on the trainer; give it to the orchestrator")
    """Accepted so that the flags of a resumed W&B run can be typed in one line; the trainer reads nothing of it."""

    bench: bool = False
    """Benchmark: a few steps on random batches (data.fake) in output_dir/bench, then a table."""

    bench_steps: int = Field(STEPS, ge=2)
    """Steps of a benchmark, of which the first is not counted; takes the place of max_steps."""

    memory_profiler_path: Path | None = None
    """Directory for a CUDA memory snapshot of the first steps, one file a rank."""

    trace_path: Path | None = None
    """Directory for a profiler trace of the third and fourth step, one file a rank."""

    heartbeat: HeartbeatConfig = HeartbeatConfig()
    """How the silence of a process that this one waits for is noticed."""

    max_concurrent_runs: int = later(1, ge=1)
    """Runs that share this trainer, one LoRA adapter each."""

    @property
    def reference_name(self) -> str | None:
        """Reference model that the trainer scores; None where the loss needs none, or the batches bring its answers."""
        reference = self.reference or (ReferenceConfig() if self.loss.needs_reference else None)
        if reference is None or reference.source == "batch":
            return None
        return reference.name or self.model.name

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        shorten(state)
        use_fake_data(state)

    @model_validator(mode="after")
    def _weights_can_travel(self) -> "TrainerConfig":
        lora = self.model.lora
        check_transfer(self.weight_broadcast.type, self.device, lora is not None and lora.publish == "adapter")
        return self

    @model_validator(mode="after")
    def _deltas_are_of_models(self) -> "TrainerConfig":
        lora, broadcast = self.model.lora, self.weight_broadcast
        if lora is not None and lora.publish == "adapter" and getattr(broadcast, "delta", None) is not None:
            raise ValueError(
                "weight_broadcast.delta: an adapter changes everywhere and is small; leave the key out, or set "
                "model.lora.publish = 'merged'"
            )
        return self

    @model_validator(mode="after")
    def _memory_fits_together(self) -> "TrainerConfig":
        check_memory(self.model, self.optim)
        return self

    @model_validator(mode="after")
    def _schedule_ends(self) -> "TrainerConfig":
        check_schedule(self.scheduler, self.optim)
        if self.scheduler.type != "constant" and self.max_steps is None:
            raise ValueError(f"scheduler.type {self.scheduler.type!r} needs max_steps to know where the decay ends")
        return self
