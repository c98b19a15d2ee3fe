"""What to change in a plan that does not fit; each change is proved by computing the plan again."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.training.model import (
    ActivationCheckpointConfig,
    ActivationOffloadConfig,
    CompileConfig,
    ContextParallelConfig,
    LoRAConfig,
)
from prime_rl.supervisor.planning.gpu_table import GIB, NODE, detect_gpu
from prime_rl.supervisor.planning.inference_plan import InferenceJob, inference_memory
from prime_rl.supervisor.planning.run_plan import (
    PlanRequest,
    RunPlan,
    is_valid,
    make_plan,
    problems,
    tokens_per_second,
)
from prime_rl.supervisor.planning.trainer_plan import TrainerJob, host_memory, trainer_memory

_SETTING, _GPUS, _TRAINING = 0, 1, 2
"""Cost of a change: a setting, more GPUs, or another training."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the settings, as the user types it; of several with the same topic one counts."""

    text: str
    apply: Callable[[RunPlan], RunPlan]
    cost: int = _SETTING
    topic: str = ""


def find_changes(plan: RunPlan) -> list[dict[str, Any]]:
    """Return the changes that make what does not fit fit, with memory and speed then; [] if it fits.

    For each process: of each topic the first that suffices alone, the cheapest first; if none does, some together.
    """
    found = list[dict[str, Any]]()
    parts: list[tuple[RunPlan, Sequence[Change]]] = []
    if plan.trainer is not None:
        alone = plan if plan.shares_gpus else replace(plan, inference=None)
        parts.append((alone, [*_trainer_changes(plan.trainer)]))
    if plan.inference is not None:
        parts.append((replace(plan, trainer=None), [*_inference_changes(plan.inference)]))
    for part, changes in parts:
        if not problems(part):
            continue
        single = [change for change in changes if _fits([change], part)]
        choices = [*{change.topic or change.text: [change] for change in reversed(single)}.values()]
        if not single:  # with offloading of weights and optimizer, and without
            on_device = [change for change in changes if change.topic != "offload"]
            choices = [_fewest_together(part, some) for some in (changes, on_device)]
            choices = [choice for choice in choices[: 1 + (choices[0] != choices[1])] if choice]
        costs = [max(change.cost for change in choice) for choice in choices]
        described = [_describe(choice, part) for choice in choices]
        order = sorted(range(len(choices)), key=lambda i: (costs[i], -described[i].get("tokens_per_second", 0)))
        found += [described[i] for i in order]
    return found


def warning_for(config: RLConfig) -> str | None:
    """Return why a run does not fit the GPUs of this machine, and what to change; None if it fits or is unknown."""
    if config.trainer.device == "cpu" or config.join is not None or (gpu := detect_gpu()) is None:
        return None
    try:
        plan = make_plan(config, PlanRequest(gpu, role="all" if config.inference is not None else "trainer"))
        found, changes = problems(plan), find_changes(plan)
    except Exception:  # noqa: BLE001  an estimate ends no run; the shape of the model may be unknown
        return None
    advice = f"; it would fit with {changes[0]['change']}" if changes else ""
    return f"by the estimate of `plan`, {'; '.join(found)}{advice}" if found else None


def _apply(changes: Sequence[Change], plan: RunPlan) -> RunPlan:
    return reduce(lambda plan, change: change.apply(plan), changes, plan)


def _fits(changes: Sequence[Change], plan: RunPlan) -> bool:
    changed = _apply(changes, plan)
    return is_valid(changed) and not problems(changed)


def _fewest_together(plan: RunPlan, changes: Sequence[Change]) -> list[Change]:
    """Add the changes in order until the plan fits, then omit those that are not needed; [] if it never fits."""
    chosen = list[Change]()
    for change in changes:
        more = [one for one in chosen if one.topic != change.topic or not one.topic] + [change]
        if is_valid(_apply(more, plan)) and _size(_apply(more, plan)) < 0.99 * _size(_apply(chosen, plan)):
            chosen = more
        if _fits(chosen, plan):
            for one in chosen[:-1]:
                fewer = [other for other in chosen if other is not one]
                chosen = fewer if _fits(fewer, plan) else chosen
            return chosen
    return []


def _size(plan: RunPlan) -> float:
    """GiB to reduce: what the trainer needs, or what inference needs besides the KV cache."""
    if plan.trainer is not None:
        return sum(trainer_memory(plan.trainer).values())
    assert plan.inference is not None
    memory = inference_memory(plan.inference)
    return sum(memory.values()) - memory["KV cache"] + plan.inference.cache_bytes(plan.inference.model_length) / GIB


def _describe(changes: Sequence[Change], plan: RunPlan) -> dict[str, Any]:
    changed = _apply(changes, plan)
    found: dict[str, Any] = {"change": ", ".join(change.text for change in changes)}
    if changed.trainer is not None:
        found["memory_gib"] = sum(trainer_memory(changed.trainer).values())
        found["host_gib_per_node"] = host_memory(changed.trainer)
        found["tokens_per_second"] = tokens_per_second(changed.trainer)
    elif changed.inference is not None:
        found["kv_cache_gib"] = inference_memory(changed.inference)["KV cache"]
    return found


def _with_trainer(plan: RunPlan, **changes: Any) -> RunPlan:
    assert plan.trainer is not None
    return replace(plan, trainer=replace(plan.trainer, **changes))


def _with_model(plan: RunPlan, **keys: Any) -> RunPlan:
    assert plan.trainer is not None
    return _with_trainer(plan, model=plan.trainer.model.model_copy(update=keys))


def _trainer_changes(job: TrainerJob) -> Iterator[Change]:
    """Yield what reduces the trainer's memory, in the order in which it is worth trying."""
    model, prefix = job.model, "--model" if job.is_sft else "--trainer.model"

    def key(text: str, cost: int = _SETTING, topic: str = "", **keys: Any) -> Change:
        return Change(f"{prefix}.{text}", partial(_with_model, **keys), cost, topic)

    full, offload = ActivationCheckpointConfig(), ActivationOffloadConfig()
    experts = job.shape.experts > 0
    if model.compile is None and not (experts or job.cp > 1 or model.tp > 1):
        yield key("compile", compile=CompileConfig())
    if model.ac is None:
        yield key("ac.mode selective", topic="ac", ac=ActivationCheckpointConfig(mode="selective"))
    if model.ac != full:
        yield key("ac", topic="ac", ac=full)
    if not model.optim_cpu_offload and not model.fsdp_cpu_offload:
        yield key("optim-cpu-offload", topic="offload", optim_cpu_offload=True)
    if model.ac_offloading is None:
        yield key(f"ac {prefix}.ac-offloading", topic="ac", ac=full, ac_offloading=offload)
    if experts and model.ep == 1 and (degree := math.gcd(job.shards, NODE)) > 1:
        yield key(f"ep {degree}", ep=degree)
    for degree in (2, 4, 8):
        if degree > job.cp:
            yield key(f"cp {degree}", topic="cp", cp=ContextParallelConfig(degree=degree))
    if not model.fsdp_cpu_offload and job.optim.type != "muon":
        instead = f" {prefix}.optim-cpu-offload false" if model.optim_cpu_offload else ""
        yield key(f"fsdp-cpu-offload{instead}", topic="offload", fsdp_cpu_offload=True, optim_cpu_offload=False)
    for ranks in (job.ranks * 2**power for power in range(1, 8)):
        change = partial(_with_trainer, ranks=ranks)
        yield Change(f"{ranks} GPUs for the trainer", change, _GPUS, "ranks")
    if model.lora is None and model.tp == 1:
        yield key("lora", _TRAINING, lora=LoRAConfig())
    half = job.row_tokens // 2
    shorter = partial(_with_trainer, row_tokens=half, sample_tokens=min(half, job.sample_tokens))
    yield Change(f"rows of {half} tokens", shorter, _TRAINING)


def _inference_changes(job: InferenceJob) -> Iterator[Change]:
    """Yield what gives inference more memory."""

    def change(text: str, num_gpus: int = job.num_gpus, **keys: Any) -> Change:
        def apply(plan: RunPlan) -> RunPlan:
            assert plan.inference is not None
            config = plan.inference.config.model_copy(update=keys)
            return replace(plan, inference=replace(plan.inference, config=config, num_gpus=num_gpus))

        return Change(text, apply, _GPUS if num_gpus > job.num_gpus else _SETTING, next(iter(keys)))

    length, config = math.ceil(job.prompt_tokens + job.longest), job.config
    if job.model_length > length:
        instead = f" in place of {config.model.max_model_len}" if config.model.max_model_len else ""
        shorter = config.model.model_copy(update={"max_model_len": length})
        yield change(f"--max-model-len {length}{instead}", model=shorter)
    most = InferenceConfig.model_fields["gpu_memory_utilization"].default
    if config.gpu_memory_utilization < most:
        yield change(f"--gpu-memory-utilization {most}", gpu_memory_utilization=most)
    for tp in (2, 4, 8):
        if tp > job.tp:
            num_gpus = math.ceil(job.num_gpus / tp) * tp
            more = f" with {num_gpus} GPUs for inference" if num_gpus > job.num_gpus else ""
            parallel = config.parallel.model_copy(update={"tp": tp})
            yield change(f"--inference.parallel.tp {tp}{more}", num_gpus, parallel=parallel)
