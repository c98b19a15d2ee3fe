"""The plan of a run: does it fit, how long does a step take, what limits it, what does it cost, and what to change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from prime_rl.configs.command_bases import check_memory
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.slurm import count_trainer_nodes
from prime_rl.configs.training.model import CompileConfig
from prime_rl.core.errors import ConfigError
from prime_rl.supervisor.planning.gpu_table import GIB, NODE, Gpu
from prime_rl.supervisor.planning.inference_plan import InferenceJob, decoding, inference_memory
from prime_rl.supervisor.planning.model_shape import ModelShape, load_shape
from prime_rl.supervisor.planning.trainer_plan import (
    TrainerJob,
    host_memory,
    state_bytes,
    trainer_memory,
    trainer_seconds,
)

Role = Literal["all", "trainer", "inference", "sft"]

_FRAGMENTATION, _CONTEXT_GIB = 1.05, 1.0
"""Of the trainer: memory that the allocator cannot use, relative, and that of CUDA and NCCL."""
_DELTA = 0.011
"""Bytes of a delta, relative to a full version, at 2 % changed weights (docs/design/deltas.md)."""
_PROMPT_TOKENS = 256
_SHARED_GPU = 0.5
_MOST_SPLITS = 64
_BUFFERS = {"nccl": 2.0 * 256 * 2**20, "ipc": 256.0 * 2**20}
"""Device buffers of the transports, as in prime_rl.trainer.weight_sync.memory_sender; ipc's holds any tensor."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan besides the configuration.

    Attributes:
        gpu: the kind of GPU.
        num_gpus: of the whole run; None is what the configuration names.
        role: `trainer` and `sft` plan the trainer alone on all GPUs, `inference` the servers alone.
        prompt_tokens: mean tokens of a prompt; None is 256, at most a quarter of a sample.
        completion_tokens: mean tokens of a completion; None is half of the longest.
        price: of a GPU hour; None computes no cost.
        upstream: plan upstream prime-rl's trainer, as in the published figures.
    """

    gpu: Gpu
    num_gpus: int | None = None
    role: Role = "all"
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    price: float | None = None
    upstream: bool = False


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Trainer and inference of a run, each None if it is not planned.

    Attributes:
        trainer: the trainer's part.
        inference: the servers' part.
        shares_gpus: both use the same GPUs.
        batch: rollouts of a step.
        asynchronous: the largest staleness in steps.
        max_steps: of the run.
        price: of a GPU hour.
        publishes_adapter: a version is an adapter.
        version_element: bytes of an element of a published version.
    """

    trainer: TrainerJob | None
    inference: InferenceJob | None
    shares_gpus: bool
    batch: int
    asynchronous: int
    max_steps: int | None
    price: float | None
    publishes_adapter: bool
    version_element: int

    @property
    def num_gpus(self) -> int:
        """GPUs of the run."""
        ranks = self.trainer.ranks if self.trainer else 0
        served = self.inference.num_gpus if self.inference else 0
        return max(ranks, served) if self.shares_gpus else ranks + served


def make_plan(config: RLConfig | SFTConfig, request: PlanRequest) -> RunPlan:
    """Return the plan of a configuration. Raises ConfigError: an unknown model, or GPUs that cannot be divided so."""
    if isinstance(config, SFTConfig):
        return _plan_sft(config, request)
    orchestrator, server = next(iter(config.orchestrators.values())), config.inference or InferenceConfig()
    shape = load_shape(config.trainer.model.name)
    degrees = {"trainer.model.tp": config.trainer.model.tp, "inference.parallel.tp": server.parallel.tp}
    for key, degree in degrees.items():
        if not _divides_heads(shape, degree):
            raise ConfigError(
                f"{key} = {degree} does not divide the attention heads of {shape.name}; use a power of two"
            )
    inference_gpus, trainer_gpus, shares = divide_gpus(config, request)
    if shares and not {*config.inference_gpu_ids} & {*config.trainer_gpu_ids}:  # on the only GPU, as `rl` sets it
        server = server.model_copy(update={"gpu_memory_utilization": _SHARED_GPU})
    fake, row = config.trainer.data.fake, config.trainer.model.seq_len
    longest = min(orchestrator.sampling.max_tokens or orchestrator.seq_len, orchestrator.seq_len)
    prompt = request.prompt_tokens or min(_PROMPT_TOKENS, orchestrator.seq_len / 4)
    most = max(1.0, min(longest, orchestrator.seq_len - prompt))
    _check_tokens(request, orchestrator.seq_len - 1, longest)
    completion = request.completion_tokens or most / 2
    sample = min(prompt + completion, orchestrator.seq_len)
    batch = sum(one.batch_size for one in config.orchestrators.values())
    if fake is not None:
        sample, batch = min(fake.seq_len, row), fake.batch_size
    elif request.role == "trainer" and request.completion_tokens is None:
        sample = row
    trainer = inference = None
    if request.role != "inference":
        trainer = _trainer_job(config, request, shape, trainer_gpus, row, sample, batch * sample)
    if request.role != "trainer":
        staleness = orchestrator.max_staleness
        in_flight = min(batch * (staleness + 1), orchestrator.max_concurrent or math.inf)
        group = orchestrator.rollouts_per_example
        inference = InferenceJob(shape, request.gpu, inference_gpus, server, prompt, completion, most, group, in_flight)
    lora, broadcast = config.trainer.model.lora, config.trainer.weight_broadcast
    return RunPlan(
        trainer,
        inference,
        shares,
        batch,
        orchestrator.max_staleness,
        config.max_steps,
        request.price,
        publishes_adapter=lora is not None and lora.publish == "adapter",
        version_element=_element(broadcast.dtype, config.trainer.device),
    )


def _check_tokens(request: PlanRequest, prompt: int, completion: int) -> None:
    limits = {"prompt": (request.prompt_tokens, prompt), "completion": (request.completion_tokens, completion)}
    for name, (tokens, most) in limits.items():
        if tokens is not None and tokens > most:
            raise ConfigError(f"--{name}-tokens {tokens:g}: the configuration allows {most}; set seq_len, or fewer")


def _divides_heads(shape: ModelShape, degree: int) -> bool:
    return all(block.query % degree == 0 for block in shape.blocks)


def _plan_sft(config: SFTConfig, request: PlanRequest) -> RunPlan:
    shape, data = load_shape(config.model.name), config.data
    _check_tokens(request, data.seq_len, data.seq_len)
    ranks = request.num_gpus or 1
    sample = (request.prompt_tokens or 0) + (request.completion_tokens or 0) or data.seq_len
    row = data.seq_len * data.micro_batch_size
    trainer = _trainer_job(config, request, shape, ranks, row, sample, data.batch_size * data.seq_len)
    element = _element(config.weights_dtype, config.device)
    return RunPlan(
        trainer, None, False, data.batch_size, 0, config.max_steps, request.price, False, version_element=element
    )


def _trainer_job(
    config: RLConfig | SFTConfig,
    request: PlanRequest,
    shape: ModelShape,
    ranks: int,
    row: int,
    sample: float,
    step: float,
) -> TrainerJob:
    trainer = config if isinstance(config, SFTConfig) else config.trainer
    model = trainer.model
    is_sft = isinstance(config, SFTConfig)
    if model.ep > 1 and not shape.experts:
        key = "model.ep" if is_sft else "trainer.model.ep"
        raise ConfigError(f"{key} = {model.ep}: {shape.name} has no experts; leave it out")
    broadcast = "filesystem" if isinstance(config, SFTConfig) else config.trainer.weight_broadcast.type
    has_reference = not isinstance(config, SFTConfig) and config.trainer.reference_name is not None
    largest = 2.0 * shape.embedding if broadcast == "ipc" else 0.0
    publication = 0.0 if broadcast == "filesystem" else max(_BUFFERS[broadcast], largest)
    if request.upstream and model.compile is None:
        model = model.model_copy(update={"compile": CompileConfig()})
    element = _element(model.dtype, trainer.device)
    job = TrainerJob(
        shape,
        request.gpu,
        ranks,
        model,
        trainer.optim,
        row,
        sample,
        step,
        element,
        request.upstream,
        is_sft,
        publication,
        has_reference,
    )
    try:
        _ = job.data_ranks
    except ValueError as error:
        raise ConfigError(f"--gpus gives the trainer {ranks} GPUs: {error}") from None
    return job


def _element(dtype: str, device: str) -> int:
    """Return the bytes of an element; `auto` is float32 on a CPU."""
    return 4 if dtype == "float32" or (dtype == "auto" and device == "cpu") else 2


def divide_gpus(config: RLConfig, request: PlanRequest) -> tuple[int, int, bool]:
    """Return the GPUs of inference and of the trainer, and whether they are the same ones.

    With another number of GPUs than configured, their ratio stays, and the trainer gets a number that it can divide.
    """
    nodes, slurm = config.nodes, config.slurm
    served, trained = len(config.inference_gpu_ids), len(config.trainer_gpu_ids)
    if nodes and nodes != ["slurm"]:
        served, trained = served * len(config.server_hosts), trained * len(config.trainer_hosts)
    elif slurm is not None and slurm.nodes > 1:
        hosts = count_trainer_nodes(slurm.nodes, slurm.inference_nodes, slurm.trainer_nodes)
        served, trained = served * slurm.inference_nodes, trained * hosts
    elif nodes:
        served, trained = served * config.inference_nodes, trained * (config.trainer_nodes or 1)
    shares = not nodes and bool({*config.inference_gpu_ids} & {*config.trainer_gpu_ids})
    total = request.num_gpus
    if request.role != "all":
        return (total or served), (total or trained), False
    if total is None or shares or total == served + trained:
        return (total or served, total or trained, True) if shares else (served, trained, False)
    if total == 1:
        return 1, 1, True
    wanted = min(total - 1, max(1, round(total * trained / (served + trained))))
    counts = sorted(range(1, total), key=lambda count: abs(count - wanted))
    for count in counts:
        if _divides(config, count) and (total - count) % (config.inference.parallel.tp if config.inference else 1) == 0:
            return total - count, count, False
    raise ConfigError(f"--gpus {total}: no number of GPUs below it fits the degrees of trainer.model; use more")


def _divides(config: RLConfig, count: int) -> bool:
    try:
        config.trainer.model.sharding_ranks(count)
    except ValueError:
        return False
    return True


def trainer_limit(plan: RunPlan) -> float:
    """Return the GiB that the trainer's tensors may have on a GPU."""
    assert plan.trainer is not None
    served = plan.inference.config.gpu_memory_utilization if plan.inference and plan.shares_gpus else 0.0
    return (plan.trainer.gpu.memory * (1 - served) - _CONTEXT_GIB) / _FRAGMENTATION


def problems(plan: RunPlan) -> list[str]:
    """Return one line for each process that does not fit."""
    found, trainer, inference = list[str](), plan.trainer, plan.inference
    if trainer is not None:
        needed, limit = sum(trainer_memory(trainer).values()), trainer_limit(plan)
        if needed > limit:
            found.append(
                f"the trainer needs {needed:.1f} GiB of each GPU, and {limit:.1f} of {trainer.gpu.memory:g} GiB of a "
                f"{trainer.gpu.name} are usable"
            )
    if inference is not None:
        cache = inference_memory(inference)["KV cache"]
        one = inference.cache_bytes(inference.model_length) / GIB
        if inference.num_gpus < inference.tp:
            found.append(f"inference has {inference.num_gpus} GPUs, less than inference.parallel.tp = {inference.tp}")
        elif cache < one:
            found.append(
                f"inference has {cache:.1f} GiB of each GPU for the KV cache, and one sequence of "
                f"{inference.model_length} tokens needs {one:.2f}"
            )
    return found


def is_valid(plan: RunPlan) -> bool:
    """Return whether the trainer's keys can be combined, and the GPUs of both processes divided so."""
    server = plan.inference
    if server is not None and (server.num_gpus % server.tp or not _divides_heads(server.shape, server.tp)):
        return False
    if plan.trainer is None:
        return True
    try:
        check_memory(plan.trainer.model, plan.trainer.optim)
        return plan.trainer.data_ranks > 0
    except ValueError:
        return False


def tokens_per_second(job: TrainerJob) -> float:
    """Return the tokens that all ranks train on in a second."""
    return job.tokens / sum(trainer_seconds(job).values())


def step_times(plan: RunPlan) -> dict[str, float]:
    """Return the seconds of training a batch, of sampling it, of its longest rollout, and of a step of the run."""
    times = dict[str, float]()
    if plan.trainer is not None:
        times["train"] = sum(trainer_seconds(plan.trainer).values())
    if (job := plan.inference) is not None:
        cache = max(0.0, inference_memory(job)["KV cache"])
        _, decode_seconds, rate = decoding(job, cache)
        times["sample"] = plan.batch * job.completion_tokens / rate
        times["longest rollout"] = job.longest * decode_seconds
    train, sample, longest = (times.get(name, 0.0) for name in ("train", "sample", "longest rollout"))
    if plan.asynchronous == 0 or plan.shares_gpus:
        times["step"] = train + max(sample, longest)
    else:
        times["step"] = max(train, sample, longest / (plan.asynchronous + 1))
    return times


def best_division(plan: RunPlan) -> tuple[int, int, float] | None:
    """Return the GPUs of inference and trainer with the shortest step that fits, and its seconds."""
    if plan.trainer is None or plan.inference is None or plan.shares_gpus:
        return None
    total, best = plan.num_gpus, None
    unit = max(1, total // _MOST_SPLITS)
    for count in range(unit, total, unit):
        served = (total - count) // plan.inference.tp * plan.inference.tp
        other = replace(
            plan, trainer=replace(plan.trainer, ranks=count), inference=replace(plan.inference, num_gpus=served)
        )
        if served and is_valid(other) and not problems(other):
            seconds = step_times(other)["step"]
            if best is None or seconds < best[2]:
                best = served, count, seconds
    return best


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return everything that the plan computes."""
    result: dict[str, Any] = {"fits": not (found := problems(plan)), "problems": found, "gpus": plan.num_gpus}
    times = step_times(plan)
    if (job := plan.trainer) is not None:
        memory, seconds = trainer_memory(job), trainer_seconds(job)
        result["trainer"] = {
            "gpus": job.ranks,
            "memory_gib": sum(memory.values()),
            "usable_gib": trainer_limit(plan),
            "memory_parts_gib": memory,
            "host_gib_per_node": host_memory(job),
            "parameters": job.shape.parameters,
            "trained_parameters": job.trained,
            "tokens_per_second": tokens_per_second(job),
            "tokens_per_step": job.tokens,
            "seconds_per_step": times["train"],
            "seconds": seconds,
        }
        result["version"] = _version(plan, job)
    if (server := plan.inference) is not None:
        memory = inference_memory(server)
        batch, _, rate = decoding(server, max(0.0, memory["KV cache"]))
        result["inference"] = {
            "gpus": server.num_gpus,
            "memory_gib": sum(memory.values()),
            "memory_parts_gib": memory,
            "sequences_per_copy": batch,
            "tokens_per_second": rate,
            "seconds_per_batch": times["sample"],
            "seconds_longest_rollout": times["longest rollout"],
        }
    if plan.trainer is not None and plan.inference is not None:
        limits = {name: times[name] for name in ("train", "sample")}
        limits["longest rollout"] = times["longest rollout"] / (plan.asynchronous + 1)
        result["step"] = {"seconds": times["step"], "limited_by": max(limits, key=limits.__getitem__)}
        if (best := best_division(plan)) is not None:
            result["step"]["best_division"] = dict(zip(("inference", "trainer", "seconds"), best, strict=True))
    if plan.price is not None:
        result["cost"] = _cost(plan, times)
    return result


def _version(plan: RunPlan, job: TrainerJob) -> Mapping[str, float]:
    """Return bytes of a published version, of a checkpoint and of the run's disk, and the seconds of a transfer."""
    published = plan.version_element * (job.trained if plan.publishes_adapter else job.shape.parameters)
    state = state_bytes(job.optim, job.shape, job.model.lora is not None)
    nodes = math.ceil(plan.inference.num_gpus / NODE) if plan.inference else 1
    return {
        "full_gb": published / 1e9,
        "delta_gb": _DELTA * published / 1e9,
        "checkpoint_gb": (4 + state) * job.trained / 1e9,
        "weights_folder_gb": published * (plan.asynchronous + 2) / 1e9,
        "copies_over_the_network": nodes,
        "full_seconds": published / (job.gpu.network * min(NODE, job.ranks)),
        "delta_seconds": _DELTA * published / (job.gpu.network * min(NODE, job.ranks)),
    }


def _cost(plan: RunPlan, times: Mapping[str, float]) -> dict[str, float]:
    assert plan.price is not None
    seconds = times.get("step") or times["train"]
    step = plan.price * plan.num_gpus * seconds / 3600
    cost = {"per_step": step, "per_hour": plan.price * plan.num_gpus}
    if plan.trainer is not None:
        cost["per_million_trained_tokens"] = step / plan.trainer.tokens * 1e6
    if plan.max_steps is not None:
        cost["run"] = step * plan.max_steps
        cost["run_hours"] = seconds * plan.max_steps / 3600
    return cost
