"""Keys of `uv run trainer`."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, model_validator

from prime_rl.configs.bench import use_fake_data
from prime_rl.configs.command_bases import TrainingConfig
from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.configs.loading.base_config import BaseConfig, common, unused
from prime_rl.configs.loading.provenance import ConfigState
from prime_rl.configs.monitoring import METRIC_LOGGERS, WANDB_ALIASES
from prime_rl.configs.training.broadcast import BroadcastConfig, FileBroadcastConfig, check_transfer
from prime_rl.configs.training.loss import AIPOLossConfig, LossConfig, ReferenceConfig
from prime_rl.liveness.run_settings import ADAPTER_RANK, REPLAYS_ROUTES, RunSettings, describe_model


class FakeDataConfig(BaseConfig):
    """Random batches instead of the orchestrator's, for tests and benchmarks."""

    deprecated: ClassVar[dict[str, str]] = {"generate_samples": "variable_length"}

    batch_size: int = Field(8, ge=1)
    """Rollouts per batch."""

    seq_len: int = Field(128, ge=2)
    """Tokens of a rollout."""

    micro_batch_size: int = Field(8, ge=1)
    """Rollouts packed into one row; a row holds at most model.seq_len tokens."""

    variable_length: bool = False
    """Draw rollouts of different lengths instead of full ones."""


class TrainerDataConfig(BaseConfig):
    """Source of the batches. model.seq_len sets the tokens of a forward pass."""

    fake: FakeDataConfig | None = None
    """Random batches for tests and benchmarks; None waits for the orchestrator's."""


class TokenExportConfig(BaseConfig):
    """What the trainer computes for each token, in rollouts/step_N/train.safetensors."""

    interval: int = Field(10, ge=1)
    """Steps between two exports."""

    keep_last: int | None = Field(20, ge=1)
    """Number of latest exports to keep, with the rows of their batches; None keeps all."""


class PeerWandbConfig(BaseConfig):
    """The orchestrator's W&B run."""

    id: str | None = None
    """Id of the orchestrator's run."""


class PeerConfig(BaseConfig):
    """Keys of the orchestrator."""

    aliases: ClassVar[dict[str, str]] = WANDB_ALIASES

    wandb: PeerWandbConfig | None = None
    """The orchestrator's W&B run."""


class TrainerConfig(TrainingConfig):
    """The trainer: waits for batch n, trains v_n on it, publishes v_{n+1}."""

    command_name: ClassVar[str] = "trainer"
    deprecated: ClassVar[dict[str, str]] = {
        "minibatches": "num_minibatches",
        "visibility_seconds": "fs_consistency_timeout_seconds",
    }

    loss: LossConfig = Field(default_factory=AIPOLossConfig, json_schema_extra=common("Algorithm"))
    """Loss (docs/algorithms.md)."""

    reference: ReferenceConfig | None = None
    """Reference model of `loss.kl` and of distillation; None uses the base model if the loss needs one."""

    num_minibatches: int = Field(1, ge=1, json_schema_extra=common("Training"))
    """Optimizer steps per batch, all with the sampler's log-probabilities; weights are published after the last."""

    data: TrainerDataConfig = Field(default_factory=TrainerDataConfig)
    """Source of the batches."""

    weight_broadcast: BroadcastConfig = Field(default_factory=FileBroadcastConfig)
    """Transport of the weights to inference."""

    keep_batches: bool = False
    """Keep all batches on disk for replay. Default: delete batches that no checkpoint needs."""

    token_export: TokenExportConfig | None = None
    """Write logprob, ratio, entropy, clipping and masking of each token to disk; None writes nothing."""

    nodes_share_directory: bool = True
    """All nodes of the trainer use one run directory. If false, the first node publishes the versions, each node needs
    a relay, and there are no checkpoints."""

    async_level: int = Field(2, ge=0)
    """Maximum staleness k in steps; equal to the orchestrator's, whose max_off_policy_steps may extend it."""

    fs_consistency_timeout_seconds: float | None = Field(None, ge=0)
    """How long an incomplete file of another process is read again before it counts as damaged; None is 0 on a local
    disk and 60 on a network file system."""

    # Upstream documents a command line for resumed W&B runs that gives the trainer both ids.
    orchestrator: PeerConfig | None = unused(None, because="has no effect on the trainer; give it to the orchestrator")
    """Ignored. Accepted so that one command line can resume the W&B runs of both processes."""

    heartbeat: HeartbeatConfig = Field(default_factory=HeartbeatConfig)
    """Detection of unresponsive processes."""

    # Documented upstream as a key of the trainer.
    max_concurrent_runs: int = Field(1, ge=1)
    """LoRA runs that share this trainer, each in a folder run_* of output_dir with an orchestrator of its own
    (docs/multi_run.md)."""

    exit_when_idle_seconds: float | None = Field(None, ge=0)
    """With several runs: end when no run has used the trainer for so long; None waits for further runs."""

    @property
    def reference_name(self) -> str | None:
        """The reference model to load; None if the loss needs none or the batches contain its log-probabilities."""
        reference = self.reference or (ReferenceConfig() if self.loss.needs_reference else None)
        if reference is None or reference.source == "batch":
            return None
        return reference.name or self.model.name

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Complete the merged values before construction."""
        super().prepare(state)
        use_fake_data(state)
        if str(state.get("max_concurrent_runs", 1)) != "1" and state.is_on("model.lora"):
            state.fill("model.lora.publish", "adapter", state.origin("max_concurrent_runs"))

    @property
    def run_settings(self) -> RunSettings:
        """What the other processes of the run must fit; `weight_broadcast.dtype` is added when the device is known."""
        lora = self.model.lora
        return {
            "model.name": describe_model(self.model.name),
            "model.revision": self.model.revision,
            "tokenizer.name": describe_model(self.tokenizer.name or self.model.name),
            ADAPTER_RANK: lora.rank if lora is not None and lora.publish == "adapter" else None,
            REPLAYS_ROUTES: int(self.model.router_replay),
            "model.seq_len": self.model.seq_len,
            "max_steps": self.max_steps,
            "async_level": self.async_level,
            "ckpt.interval": self.ckpt.interval if self.ckpt is not None else None,
            "ckpt.path": str(self.ckpt.path) if self.ckpt is not None else None,
            "max_concurrent_runs": self.max_concurrent_runs,
        }

    @model_validator(mode="after")
    def _check(self) -> "TrainerConfig":
        if self.max_concurrent_runs > 1 and (problem := self._several_runs_problem()):
            raise ValueError(f"max_concurrent_runs = {self.max_concurrent_runs} {problem}")
        publishes_adapters = self.model.lora is not None and self.model.lora.publish == "adapter"
        check_transfer(self.weight_broadcast.type, self.device, publishes_adapters)
        if publishes_adapters and getattr(self.weight_broadcast, "delta", None) is not None:
            raise ValueError(
                "weight_broadcast.delta does not support adapters, which are small and change everywhere; remove it, "
                "or set model.lora.publish = 'merged'"
            )
        if not self.nodes_share_directory and self.ckpt is not None:
            raise ValueError("ckpt needs a directory that all nodes share; remove it, or nodes_share_directory = false")
        if self.ckpt is not None and self.ckpt.skip_dataloader:
            raise ValueError(
                "ckpt.skip_dataloader is for sft: the position in the examples belongs to the batches of the "
                "checkpoint, and each example is trained on once; to start over, export the weights (`uv run export`) "
                "and start a new run from them"
            )
        if self.scheduler.type != "constant" and self.max_steps is None and self.max_concurrent_runs == 1:
            raise ValueError(f"scheduler.type {self.scheduler.type!r} needs max_steps, the end of the decay")
        return self

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report keys that need several runs."""
        yield from super().without_effect()
        if self.max_concurrent_runs == 1:
            yield "exit_when_idle_seconds", "has no effect unless max_concurrent_runs is above 1"

    def _several_runs_problem(self) -> str | None:
        """Return what several runs need, or what they do not support."""
        if (lora := self.model.lora) is None or lora.publish != "adapter":
            return "needs --model.lora and --model.lora.publish adapter: each run trains and publishes an adapter"
        model, broadcast = self.model, self.weight_broadcast
        of_a_run = "belongs to each run: give it to the orchestrators"
        alone = "is not supported with several runs"
        refused = {
            f"max_steps {of_a_run}": self.max_steps is not None,
            f"ckpt {of_a_run}": self.ckpt is not None,
            f"{', '.join(METRIC_LOGGERS)} {of_a_run}": bool(self.metric_loggers),
            f"weight_broadcast.type = {broadcast.type!r} {alone}": broadcast.type != "filesystem",
            f"model.tp or model.cp {alone}": model.tp > 1 or model.cp is not None,
            f"model.compile {alone}": model.compile is not None,
            f"model.router_replay {alone}": model.router_replay,
            f"model.lora.dropout {alone}, which would share random numbers": lora.dropout > 0,
            f"offloading to the CPU {alone}": model.optim_cpu_offload or model.fsdp_cpu_offload,
            f"deterministic {alone}, whose rows share forward passes by time": self.deterministic,
            f"data.fake or bench {alone}": self.data.fake is not None or self.bench,
            f"nodes_share_directory = false {alone}": not self.nodes_share_directory,
            f"trace_path or memory_profiler_path {alone}": bool(self.trace_path or self.memory_profiler_path),
        }
        return next((f"and {reason}" for reason, is_wrong in refused.items() if is_wrong), None)
