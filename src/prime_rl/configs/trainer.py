"""Keys of `uv run trainer`."""

from typing import ClassVar

from pydantic import Field, model_validator

from prime_rl.configs.shared.bench import use_fake_data
from prime_rl.configs.shared.blocks import WANDB_ALIASES
from prime_rl.configs.shared.heartbeat import HeartbeatConfig
from prime_rl.configs.training.broadcast import BroadcastConfig, FileBroadcastConfig, check_transfer
from prime_rl.configs.training.common import TrainingConfig
from prime_rl.configs.training.loss import AIPOLossConfig, LossConfig, ReferenceConfig
from prime_rl.liveness.run_settings import ADAPTER_RANK, RunSettings, describe_model
from prime_rl.loading.base_config import BaseConfig, common, unused
from prime_rl.loading.provenance import ConfigState


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

    command: ClassVar[str] = "trainer"
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
    max_concurrent_runs: int = unused(1, ge=1)
    """Runs that share this trainer, with one LoRA adapter each (not implemented)."""

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

    @property
    def run_settings(self) -> RunSettings:
        """What the other processes of the run must fit; `weight_broadcast.dtype` is added when the device is known."""
        lora = self.model.lora
        return {
            "model.name": describe_model(self.model.name),
            "tokenizer.name": describe_model(self.tokenizer.name or self.model.name),
            ADAPTER_RANK: lora.rank if lora is not None and lora.publish == "adapter" else None,
            "model.seq_len": self.model.seq_len,
            "max_steps": self.max_steps,
            "async_level": self.async_level,
            "ckpt.interval": self.ckpt.interval if self.ckpt is not None else None,
            "ckpt.path": str(self.ckpt.path) if self.ckpt is not None else None,
        }

    @model_validator(mode="after")
    def _check(self) -> "TrainerConfig":
        publishes_adapters = self.model.lora is not None and self.model.lora.publish == "adapter"
        check_transfer(self.weight_broadcast.type, self.device, publishes_adapters)
        if publishes_adapters and getattr(self.weight_broadcast, "delta", None) is not None:
            raise ValueError(
                "weight_broadcast.delta does not support adapters, which are small and change everywhere; remove it, "
                "or set model.lora.publish = 'merged'"
            )
        if not self.nodes_share_directory and self.ckpt is not None:
            raise ValueError("ckpt needs a directory that all nodes share; remove it, or nodes_share_directory = false")
        if self.scheduler.type != "constant" and self.max_steps is None:
            raise ValueError(f"scheduler.type {self.scheduler.type!r} needs max_steps, the end of the decay")
        return self
