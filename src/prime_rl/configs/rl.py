"""Keys of `uv run rl`, with the values that trainer, orchestrator and inference share."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.algorithm import Algorithm, apply_algorithm, set_fixed_length
from prime_rl.configs.base_model import NameConfig
from prime_rl.configs.bench import limit_to_bench_steps, use_fake_data
from prime_rl.configs.client import SERVER_ADDRESS_VAR
from prime_rl.configs.command_bases import RunConfig
from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.lists import IntList, StrList
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.configs.loading.provenance import ConfigState
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared_values import complete_runs, share_all, take_joined_run
from prime_rl.configs.slurm import SlurmConfig, count_trainer_nodes
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.broadcast import check_placement


class PageConfig(BaseConfig):
    """The page that shows the run in a browser (docs/monitoring.md)."""

    port: int = Field(8420, ge=0, le=65535)
    """Port on 127.0.0.1; 0 takes any free port."""


class RLConfig(RunConfig):
    """A whole run, on one node or several: starts inference (if configured), the orchestrator and the trainer."""

    command_name: ClassVar[str] = "rl"
    deprecated: ClassVar[dict[str, str]] = {"grace_seconds": "grace_timeout_seconds"}
    variables: ClassVar[dict[str, str]] = {SERVER_ADDRESS_VAR: "orchestrator.client.host"}

    model: NameConfig = Field(default_factory=NameConfig)
    """The model of all processes."""

    max_epochs: float | None = Field(None, gt=0)
    """Passes over the training examples of all environments together, of which `rl` computes max_steps; the smaller one
    counts if both are given. None sets no limit. Groups that are dropped are not repeated."""

    async_level: int = Field(2, ge=0, json_schema_extra=common("Algorithm"))
    """Maximum staleness k in steps: tokens of batch n are sampled by version n - k or newer. 0 is on-policy.
    orchestrator.max_off_policy_steps replaces the limit."""

    seq_len: int | None = Field(None, ge=2, json_schema_extra=common("Model"))
    """Sequence length of trainer and orchestrator in tokens; None uses their defaults (2048)."""

    max_model_len: int | None = Field(None, ge=1, json_schema_extra=common("Model"))
    """Maximum tokens of prompt and completion in inference; None is seq_len if given, else the model's limit."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, json_schema_extra=common("GPUs"))
    """Share of GPU memory for inference; None is 0.9, or 0.5 if the trainer uses the same GPU."""

    algorithm: Algorithm | None = Field(None, json_schema_extra=common("Algorithm"))
    """Preset of orchestrator.advantage and trainer.loss (docs/algorithms.md), which can still be set separately; None
    keeps their defaults, those of aipo."""

    seed: int | None = Field(None, ge=0)
    """Seed of trainer and orchestrator; None uses their defaults (42)."""

    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """The trainer; all keys of `uv run trainer`."""

    orchestrator: OrchestratorConfig = Field(default_factory=OrchestratorConfig)
    """The orchestrator; all keys of `uv run orchestrator`."""

    runs: dict[str, OrchestratorConfig] = Field({})
    """Runs that share the trainer (trainer.max_concurrent_runs above 1): the changes of `orchestrator` for each, as
    tables [runs.NAME]. Without any there is one run, `default`."""

    join: Path | None = None
    """output_dir of a running trainer of several runs, to which this adds the run `exp_id`: it starts an orchestrator
    alone. Keys of `trainer` that a run may choose apply to this run, the others and `inference` to nothing."""

    inference: InferenceConfig | None = Field(None, json_schema_extra=common("Inference"))
    """The inference server that `rl` starts; all keys of `uv run inference`. None uses a running server."""

    inference_gpu_ids: IntList = Field([0], json_schema_extra=common("GPUs"))
    """GPUs of inference, counted within CUDA_VISIBLE_DEVICES; unused on a machine without GPUs."""

    trainer_gpu_ids: IntList = Field([1], json_schema_extra=common("GPUs"))
    """GPUs of the trainer, with one rank each, counted within CUDA_VISIBLE_DEVICES; unused without GPUs."""

    inference_gpus: int | None = Field(None, ge=1, json_schema_extra=common("GPUs"))
    """Number of GPUs of inference, the first ones; an alternative to inference_gpu_ids."""

    trainer_gpus: int | None = Field(None, ge=1, json_schema_extra=common("GPUs"))
    """Number of GPUs of the trainer, after those of inference; an alternative to trainer_gpu_ids."""

    trainer_ranks: int | None = Field(None, ge=1)
    """Number of trainer processes; None is one per GPU of the trainer. Set it for several ranks on a CPU."""

    nodes: StrList = Field([])
    """Hosts of a run on several nodes, or `slurm` for those of the Slurm job: the first inference_nodes have a server
    each, the last trainer_nodes train together. `rl` itself and the orchestrator stay on this host. GPU ids and
    trainer_ranks count within a node. Empty runs all on this host."""

    inference_nodes: int = Field(1, ge=1)
    """Nodes with a server each, or, with inference.parallel.dp_local, with that many copies each of one server."""

    trainer_nodes: int | None = Field(None, ge=1)
    """Nodes of the trainer; None is all without a server. With more, the nodes in the middle have both roles, on
    different GPUs: 2 of 2 nodes with inference_gpus = 3 and trainer_gpus = 5 is a ratio of 6:10."""

    launcher: Literal["ssh", "srun"] | None = None
    """How processes on `nodes` are started; None is srun with `nodes = slurm`, and ssh otherwise."""

    rendezvous_port: int = Field(29500, ge=1, le=65535)
    """Port of torchrun on the first node of the trainer, if `nodes` is set."""

    page: PageConfig | None = Field(None, json_schema_extra=common("Run"))
    """Serves the page while the run lasts. `uv run page OUTPUT_DIR` also shows finished runs."""

    slurm: SlurmConfig | None = None
    """Submits the run to Slurm instead of starting it here."""

    clean: bool = False
    """Remove an earlier run from the run directory; false moves it to earlier/. Neither is done when resuming."""

    heartbeat: HeartbeatConfig = Field(default_factory=HeartbeatConfig)
    """Detection of unresponsive and dead processes."""

    max_restarts: int = Field(0, ge=0, json_schema_extra=common("Run"))
    """Restarts of inference, orchestrator and trainer each after an exit; with 0 the first exit fails the run. Bad
    input is never restarted (docs/deployment.md)."""

    grace_timeout_seconds: float = Field(5, ge=1)
    """Time for an orderly shutdown after SIGTERM, Ctrl-C or a failure, before processes are killed. Set it below the
    grace period of the cluster's scheduler."""

    checkpoint_grace_seconds: float = Field(25, ge=0)
    """With `ckpt`, time after SIGTERM to finish the step in progress and save a checkpoint, before the shutdown. Both
    times together must be below the grace period of the cluster's scheduler."""

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Copy the shared values to the three processes; see `prime_rl.configs.shared_values`."""
        take_joined_run(state)
        apply_algorithm(state)
        share_all(state)
        batch = {
            key: state.get(f"orchestrator.{key}", OrchestratorConfig.model_fields[key].default)
            for key in ("batch_size", "seq_len")
        }
        limit_to_bench_steps(state, "", "trainer.", "orchestrator.")
        use_fake_data(state, "trainer.", **batch)
        complete_runs(state)
        set_fixed_length(state, batch["seq_len"])

    @property
    def ranks(self) -> int:
        """Number of trainer processes, on each node of the trainer."""
        return self.trainer_ranks or len(self.trainer_gpu_ids)

    @property
    def orchestrators(self) -> dict[str, OrchestratorConfig]:
        """The orchestrators by the name of their process: one, or one for each of `runs`."""
        return {f"run_{name}": run for name, run in self.runs.items()} or {"orchestrator": self.orchestrator}

    @property
    def server_hosts(self) -> list[str]:
        """The `nodes` with a server."""
        return self.nodes[: self.inference_nodes]

    @property
    def trainer_hosts(self) -> list[str]:
        """The `nodes` of the trainer. Raises ValueError if there are too few nodes, or some without a role."""
        return self.nodes[-count_trainer_nodes(len(self.nodes), self.inference_nodes, self.trainer_nodes) :]

    def change_orchestrators(self, change: Callable[[OrchestratorConfig], OrchestratorConfig]) -> Self:
        """Return a copy with `change` applied to each orchestrator."""
        runs = {name: change(run) for name, run in self.runs.items()}
        return self.model_copy(update={"runs": runs} if runs else {"orchestrator": change(self.orchestrator)})

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report the GPUs of a server that `rl` does not start."""
        yield from super().without_effect()
        if self.inference is None:
            yield "inference_gpu_ids", "starts no server without an [inference] block"
        if not self.nodes:
            yield from (
                (key, "has no effect without nodes")
                for key in ("inference_nodes", "trainer_nodes", "launcher", "rendezvous_port")
            )

    def doubtful(self, prefix: str = "") -> Iterator[str]:
        """Report doubtful values of the processes, and batches that cannot be divided evenly."""
        yield from self.trainer.doubtful("trainer.")
        names = {f"runs.{name}": run for name, run in self.runs.items()} or {"orchestrator": self.orchestrator}
        for name, one in names.items():
            yield from one.doubtful(f"{name}.")
            batch, parts = one.batch_size, one.num_minibatches or self.trainer.num_minibatches
            if batch % parts:
                yield (
                    f"{name}.batch_size = {batch} is not divisible by trainer.num_minibatches = {parts}: the "
                    "minibatches of a step have different sizes"
                )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for one in self.orchestrators.values():
            if one.clean:
                raise ValueError(
                    "orchestrator.clean would remove what the other processes write; `rl` has the key clean"
                )
            if self.join is None and self.trainer.model.seq_len < one.seq_len:
                raise ValueError(
                    f"trainer.model.seq_len = {self.trainer.model.seq_len} is shorter than "
                    f"orchestrator.seq_len = {one.seq_len}; the trainer must hold whole rows"
                )
        for key in ("inference_gpu_ids", "trainer_gpu_ids"):
            ids = getattr(self, key)
            if twice := [gpu for gpu in ids if ids.count(gpu) > 1]:
                raise ValueError(f"{key} names GPU {twice[0]} twice; trainer_ranks sets several ranks on a CPU")
        self._check_runs()
        if self.nodes:
            self._check_nodes()
        if self.nodes != ["slurm"]:  # else the job determines the number of nodes, and they are checked in it
            self.check_shared_nodes()
        try:
            if self.nodes != ["slurm"]:  # else the job determines the number of nodes, and the trainer checks
                self.trainer.model.sharding_ranks(self.ranks * self._num_trainer_nodes())
        except ValueError as error:
            keys = "trainer_ranks" if self.trainer_ranks else "trainer_gpu_ids"
            raise ValueError(f"trainer.{error} ({keys} sets their number)") from None
        if not self.nodes and self.inference is not None and self.inference.parallel.spans_nodes:
            raise ValueError(
                "inference.parallel: a server over several nodes needs their names in `nodes` (docs/deployment.md); "
                "--slurm cannot start it, use --nodes slurm in a job"
            )
        if self.inference is None and self.gpu_memory_utilization is not None:
            raise ValueError(
                "gpu_memory_utilization is for the server that `rl` starts, and there is no [inference] block; add "
                "--inference, or set it where your server is started"
            )
        lora = self.trainer.model.lora
        if lora is not None and lora.publish == "adapter" and self.inference is not None:
            key, limit = "trainer.model.lora", self.inference.max_lora_rank
            if not self.inference.enable_lora:
                raise ValueError(f"{key}.publish = 'adapter' needs inference.enable_lora = true; or publish 'merged'")
            if limit < lora.rank:
                raise ValueError(f"{key}.rank = {lora.rank} is more than inference.max_lora_rank = {limit}")
        if self.trainer.model.router_replay and self.inference and not self.inference.enable_return_routed_experts:
            raise ValueError("trainer.model.router_replay needs inference.enable_return_routed_experts = true")
        if self.inference is not None and "speculative_config" in self.inference.vllm:
            for key in (key for one in self.orchestrators.values() for key, each in one.samplings() if each.min_p):
                raise ValueError(f"orchestrator.{key}.min_p: not supported by inference.vllm.speculative_config; set 0")
        served = self.inference_gpu_ids if self.inference else None
        evaluated = self.orchestrator.eval.base_url if self.orchestrator.eval else None
        tensor_parallel = self.inference.parallel.tp if self.inference else 1
        check_placement(self.trainer.weight_broadcast.type, self.trainer_gpu_ids, served, evaluated, tensor_parallel)
        return self

    def _check_runs(self) -> None:
        limit = self.trainer.max_concurrent_runs
        if not self.runs:
            if keys := self.orchestrator.training_keys:
                raise ValueError(
                    f"orchestrator.{keys[0]} is for a trainer of several runs (trainer.max_concurrent_runs above 1); "
                    f"set trainer.{keys[0]}"
                )
            return
        if self.join is None and limit == 1:
            raise ValueError("runs share one trainer: set trainer.max_concurrent_runs to 2 or more")
        if self.bench or self.max_epochs is not None or (self.slurm is not None and self.slurm.nodes > 1):
            raise ValueError("bench, max_epochs and slurm.nodes above 1 are not supported with several runs")
        if self.inference is not None and self.inference.relay is not None:
            raise ValueError("inference.relay is not supported with several runs: its server takes one run at a time")
        if self.inference is not None and self.inference.max_loras < limit:
            raise ValueError(
                f"inference.max_loras = {self.inference.max_loras} is below trainer.max_concurrent_runs = {limit}"
            )

    def _num_trainer_nodes(self) -> int:
        slurm = self.slurm
        if slurm is not None and slurm.nodes > 1:
            return count_trainer_nodes(slurm.nodes, slurm.inference_nodes, slurm.trainer_nodes)
        return len(self.trainer_hosts) if self.nodes else 1

    def check_shared_nodes(self) -> None:
        """Raise ValueError if nodes have both roles and a GPU would have two."""
        slurm = self.slurm
        if slurm is not None and slurm.nodes > 1:
            is_shared = slurm.inference_nodes + self._num_trainer_nodes() > slurm.nodes
        else:
            is_shared = bool(self.nodes) and bool({*self.server_hosts} & {*self.trainer_hosts})
        both = {*self.inference_gpu_ids} & {*self.trainer_gpu_ids}
        if is_shared and both and self.trainer.device != "cpu":
            raise ValueError(
                f"inference_gpu_ids and trainer_gpu_ids both name GPU {min(both)}, but nodes have both roles; set "
                "different ones, such as --inference-gpus 3 --trainer-gpus 5"
            )

    def _check_nodes(self) -> None:
        if wrong := [node for node in self.nodes if not re.fullmatch(r"\w[\w.-]*", node)]:
            raise ValueError(f"nodes: {wrong[0]!r} is not the name or IPv4 address of a host")
        if twice := [node for node in self.nodes if self.nodes.count(node) > 1]:
            raise ValueError(f"nodes names {twice[0]} twice")
        if self.inference is None:
            raise ValueError("nodes starts a server on each inference node: add --inference")
        if self.inference.parallel.headless or self.inference.parallel.start_rank:
            raise ValueError("inference.parallel: `rl` sets headless and start_rank of each node; remove them")
        if self.nodes != ["slurm"]:
            count_trainer_nodes(len(self.nodes), self.inference_nodes, self.trainer_nodes)
        if self.trainer.weight_broadcast.type != "filesystem":
            raise ValueError(f"weight_broadcast.type = {self.trainer.weight_broadcast.type!r} does not work with nodes")
        if self.bench or self.slurm is not None:
            raise ValueError("nodes cannot be combined with bench or slurm (which has slurm.nodes)")
