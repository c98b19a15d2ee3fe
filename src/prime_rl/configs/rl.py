"""Keys of `uv run rl`, which owns the values that the three processes share."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from prime_rl.configs.algorithm import Algorithm, apply_algorithm, measure_fixed_length
from prime_rl.configs.base import RootConfig
from prime_rl.configs.bench import STEPS, shorten, use_fake_data
from prime_rl.configs.broadcast import check_placement
from prime_rl.configs.handing import (
    ENDPOINT,
    MODEL_LEN,
    VALUES,
    assign_gpus,
    check_adapters,
    hand_over,
    leave_room,
    move_run,
    name_wandb_runs,
    serve_adapters,
    switch_blocks,
    wait_for_restarts,
)
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import (
    CkptConfig,
    HeartbeatConfig,
    IntList,
    LogConfig,
    Monitored,
    NameConfig,
    WandbConfig,
)
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.run.paths import RunPaths


class RLConfig(RootConfig):
    """A whole run on one node: starts inference (if configured), the orchestrator and the trainer."""

    command: ClassVar[str] = "rl"
    aliases: ClassVar[dict[str, str]] = Monitored

    model: NameConfig = NameConfig()
    """The model, for all three."""

    max_steps: int | None = Field(None, ge=1)
    """Steps of the run, for trainer and orchestrator; None goes on for ever."""

    async_level: int = Field(2, ge=0)
    """Bound k on staleness, steps, for trainer and orchestrator."""

    seq_len: int | None = Field(None, ge=2)
    """Sequence length, tokens, for trainer and orchestrator; None leaves it to each (2048)."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt and completion that inference takes, tokens; None is seq_len, where
    one is given, else the model's own."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of GPU memory for inference; None leaves it to inference: 0.9, or 0.5 where the trainer shares a GPU."""

    algorithm: Algorithm | None = None
    """Sets the matching orchestrator.advantage and trainer.loss, docs/losses.md; either can still be set by itself.
    None leaves both at their defaults, which are those of aipo."""

    seed: int | None = None
    """Seed of trainer and orchestrator; None leaves it to each (42)."""

    trainer: TrainerConfig = TrainerConfig()
    """The trainer; all keys of `uv run trainer`."""

    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """The orchestrator; all keys of `uv run orchestrator`."""

    inference: InferenceConfig | None = None
    """The inference server; all keys of `uv run inference`. None uses a server that runs already."""

    inference_gpu_ids: IntList = Field([0])
    """GPUs of inference, counted within CUDA_VISIBLE_DEVICES; not used on a machine without a GPU."""

    trainer_gpu_ids: IntList = Field([1])
    """GPUs of the trainer, one rank each, counted within CUDA_VISIBLE_DEVICES; not used without a GPU."""

    inference_gpus: int | None = Field(None, ge=1)
    """How many GPUs inference gets: the first ones; another way to say inference_gpu_ids."""

    trainer_gpus: int | None = Field(None, ge=1)
    """How many GPUs the trainer gets: those after inference's; another way to say trainer_gpu_ids."""

    trainer_ranks: int | None = Field(None, ge=1)
    """Trainer processes; None is one per GPU of the trainer. Use it for several ranks on a CPU."""

    ckpt: CkptConfig | None = None
    """Checkpoints of the whole run, by trainer and orchestrator; None writes none."""

    wandb: WandbConfig | None = None
    """Weights & Biases, for trainer and orchestrator: runs NAME-trainer and NAME-orchestrator."""

    log: LogConfig = LogConfig()
    """The log, for all three."""

    clean: bool = True
    """Remove the rollouts, weights, metrics and samples that an earlier run left in the run directory, and move its
    checkpoints to abandoned/; false refuses to start there. Nothing is touched when resuming."""

    bench: bool = False
    """Benchmark: first inference with the orchestrator, then the trainer on random batches of the same shape, in
    output_dir/bench; then a table."""

    bench_steps: int = Field(STEPS, ge=2)
    """Steps of a benchmark, of which the first is not counted; takes the place of max_steps."""

    heartbeat: HeartbeatConfig = HeartbeatConfig()
    """How a silent, stuck or dead process is noticed, by `rl` and the three."""

    max_restarts: int = Field(0, ge=0)
    """How often each of inference, orchestrator and trainer is started again after it died, in one run; with 0 the
    first death ends the run. Bad input always does. See docs/deployment.md."""

    grace_seconds: float = Field(5, ge=1)
    """Time for an orderly end after SIGTERM, Ctrl-C or a failure, seconds; then what is left is killed. Less than what
    the scheduler of a cluster gives."""

    @classmethod
    def prepare(cls, state: Any) -> None:
        """Hand the shared values to the three; see `prime_rl.configs.handing`."""
        switch_blocks(state, "ckpt", ("trainer.ckpt", "orchestrator.ckpt"), together=True)
        switch_blocks(state, "wandb", ("trainer.wandb", "orchestrator.wandb"), together=False)
        move_run(state)
        apply_algorithm(state)
        hand_over(state, VALUES)
        hand_over(state, MODEL_LEN)
        measure_fixed_length(state, OrchestratorConfig.model_fields["seq_len"].default)
        if not state.is_set("orchestrator.client.base_url"):
            hand_over(state, ENDPOINT)
        name_wandb_runs(state)
        assign_gpus(state)
        leave_room(state)
        serve_adapters(state)
        wait_for_restarts(state)
        shorten(state, "", "trainer.", "orchestrator.")
        use_fake_data(state, "trainer.", **_batch_shape(state))

    def dry_run_path(self) -> Path:
        """The record of the run."""
        return RunPaths(self.output_dir).run_toml

    @property
    def ranks(self) -> int:
        """Trainer processes."""
        return self.trainer_ranks or len(self.trainer_gpu_ids)

    @model_validator(mode="after")
    def _check(self) -> "RLConfig":
        if self.trainer.model.seq_len < self.orchestrator.seq_len:
            raise ValueError(
                f"trainer.model.seq_len = {self.trainer.model.seq_len} is shorter than "
                f"orchestrator.seq_len = {self.orchestrator.seq_len}; the trainer must hold whole rows"
            )
        try:
            self.trainer.model.sharding_ranks(self.ranks)
        except ValueError as error:
            keys = "trainer_ranks" if self.trainer_ranks else "trainer_gpu_ids"
            raise ValueError(f"trainer.{error} ({keys} says how many there are)") from None
        if self.inference is not None and self.inference.parallel.spans_nodes:
            raise ValueError(
                "inference.parallel: `rl` starts all on one node, so it cannot start a server over several; start "
                "inference, orchestrator and trainer by themselves (docs/deployment.md)"
            )
        check_adapters(self.trainer.model.lora, self.inference)
        check_placement(
            self.trainer.weight_broadcast.type,
            self.trainer_gpu_ids,
            None if self.inference is None else self.inference_gpu_ids,
            None if self.orchestrator.eval is None else self.orchestrator.eval.base_url,
        )
        return self


def _batch_shape(state: Any) -> dict[str, Any]:
    """Return the keys of `data.fake` for batches as large as the orchestrator's: rollouts as long as they may be."""
    keys = ("batch_size", "seq_len")
    fields = OrchestratorConfig.model_fields
    given = {key: state.get(f"orchestrator.{key}") for key in keys if state.is_set(f"orchestrator.{key}")}
    return {key: given.get(key, fields[key].default) for key in keys}
