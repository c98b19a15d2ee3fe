"""Metrics and log line of a step, reported by rank 0, with a profiler of the first steps.

`TokenDistributions` samples per-token values of a step, from which the monitors draw histograms (`log_extras`).

MFU is the model FLOPs of a batch (`ModelFlops`) per second over the peak FLOP/s of the devices (`peak_flops`).
"""

import re
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.monitors import Monitor
from prime_rl.monitors.slow_rank import SLOW_RANK
from prime_rl.storage.batch import Progress
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.losses.loss_inputs import clamped_difference, finite
from prime_rl.trainer.memory_savings import warn_if_host_memory_is_short
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.process_setup import check_writable
from prime_rl.trainer.train_step import Objective, ScoredRow, StepResult, TrainStep, warn_if_warmup_exceeds_run

_GIB = 1024**3
_SHOWN = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "entropy": "entropy",
    "mismatch_kl": "mismatch",
    "lr": "lr",
    "perf/tokens_per_second": "tokens/s",
    "time/step": "seconds",
}
"""Metrics of the log line, and their labels."""
BUSY = "time/busy"
_WAITS = ("wait_for_batch", "load_data", "wait_for_turn")
"""Laps in which a rank waits for data or for other runs."""


class StepTimer:
    """Measures the phases of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}  # seconds by name
        self.start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the last lap as `name`."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


class StepReporter:
    """Computes throughput and passes the metrics of each step to the monitor."""

    def __init__(
        self,
        policy: PolicyModel,
        config: TrainerConfig | SFTConfig,
        world: World,
        monitor: Monitor | None,
        train_step: TrainStep,
        name: str = "",
    ) -> None:
        """`monitor` is None except on rank 0; `name` begins the lines of the log. Measures the peak FLOP/s of a CPU."""
        self._profiler = Profiler(config.trace_path, config.memory_profiler_path, world)
        self._world, self._monitor = world, monitor
        self._flops: ModelFlops | None = None
        try:
            self._flops = ModelFlops.of(policy)
        except Exception as error:  # noqa: BLE001  a metric ends no run
            if world.is_main:
                logger.warning("perf/mfu has no value: FLOPs of {}: {}", config.model.name, summarize_exception(error))
        self._train_step, self._prefix = train_step, f"{name} | " if name else ""
        if world.is_main:
            parameters = sum(p.numel() for p in policy.parameters())
            trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
            which = "" if trained == parameters else f" ({trained:,} trained)"
            count = f"{parameters:,} parameters{which}"
            logger.info(f"{self._prefix}{config.model.name}: {count} on {world.size} x {world.device.type}")
            warn_if_warmup_exceeds_run(config.scheduler, config.max_steps)
            warn_if_host_memory_is_short(config, policy, world.size)
        self._peak = (
            peak_flops(world.device, compute_dtype(config.model.dtype, world.device)) if world.is_main else None
        )

    def report(
        self,
        step: int,
        result: StepResult,
        timer: StepTimer,
        lengths: NDArray[np.integer],
        scored: int,
        progress: Progress,
        publication: Mapping[str, float | None] | None = None,
        distributions: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Report a step. All ranks call it together.

        `timer` has a lap `train`, and every lap becomes `time/<name>`. `lengths` are the tokens of each sample of the
        whole batch, `scored` the number of trained tokens, `progress` includes the step, `publication` are the metrics
        of the publisher, `distributions` values of sampled tokens by name.
        """
        self._profiler.step()
        own = {
            "time/step": time.perf_counter() - timer.start,
            **{f"time/{name}": timer.laps[name] for name in _WAITS if name in timer.laps},
            "time/synchronize": self._train_step.synchronize_seconds,
            "perf/peak_memory_gib": peak_memory(self._world.device) / _GIB,
        }
        waits = sum(own.get(f"time/{name}", 0.0) for name in (*_WAITS, "synchronize"))
        own[BUSY] = own["time/step"] - waits
        over_ranks = rank_statistics(own, self._world)
        if self._monitor is None:
            return
        tokens, seconds = int(lengths.sum()), timer.laps["train"]
        flops, peak = self._flops, seconds * self._peak * self._world.size if self._peak else None
        metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            **result.layer_norms,
            **result.means,
            **result.rates,
            "optim/skipped": result.skipped,
            "tokens": tokens,
            **progress.metrics(),
            "world_size": self._world.size,
            **own,
            **over_ranks,
            **{f"time/{name}": seconds for name, seconds in timer.laps.items()},
            # Tokens without padding, and model FLOPs, per second of forward, backward and update.
            "perf/tokens_per_second": tokens / seconds,
            "perf/mfu": flops.total(lengths, scored) / peak if flops and peak else None,
            "perf/mfu_simple": flops.total_upstream(lengths) / peak if flops and peak else None,
            **(publication or {}),
        }
        self._monitor.log(step, metrics)
        if distributions:
            self._monitor.log_distributions(step, distributions)
        values = {label: metrics[name] for name, label in _SHOWN.items() if name in metrics}
        if (slowdown := over_ranks.get("rank/slowdown", 1.0)) >= SLOW_RANK:
            values[f"slowest rank {over_ranks['rank/slowest']}, times the median"] = slowdown
        parts = [f"{label} {'-' if value is None else f'{value:.4g}'}" for label, value in values.items()]
        logger.info(f"{self._prefix}step {step} | " + " | ".join(parts))

    def close(self) -> None:
        """Close the monitor and stop recording."""
        self._profiler.close()
        if self._monitor is not None:
            self._monitor.close()


def rank_statistics(values: Mapping[str, float], world: World) -> dict[str, float]:
    """Return mean, minimum, lower median and maximum over the ranks of what each one measured, and the slowest rank.

    All ranks call it together, with the same names in order.
    """
    table = torch.zeros(world.size, len(values), dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(list(values.values()), dtype=torch.float64)
    table = world.sum(table).cpu()
    rows = {"mean": table.mean(0), "min": table.amin(0), "median": table.median(0).values, "max": table.amax(0)}
    found = {
        f"{name}/rank_{stat}": value
        for stat, row in rows.items()
        for name, value in zip(values, row.tolist(), strict=True)
    }
    if BUSY in values and world.size > 1:
        busy = table[:, [*values].index(BUSY)]
        found["rank/slowest"] = int(busy.argmax())
        found["rank/slowdown"] = found[f"{BUSY}/rank_max"] / max(found[f"{BUSY}/rank_median"], 1e-9)
    return found


# The first step compiles and allocates, the second warms up the profiler. A trace grows by some hundred megabytes a
# step.
_SKIPPED, _WARMUP, _TRACED = 1, 1, 2
_LAST_TRACED = _SKIPPED + _WARMUP + _TRACED


class Profiler:
    """Records the third and fourth step of this process. Call `step` after each, and `close` after the last.

    Writes `trace_path`/rank_N.json (for Perfetto or chrome://tracing) and `memory_path`/rank_N.pickle (for
    pytorch.org/memory_viz).
    """

    def __init__(self, trace_path: Path | None, memory_path: Path | None, world: World) -> None:
        """Start recording; None disables the trace or the snapshot.

        Raises ConfigError if a memory snapshot is requested without CUDA, or a directory is not writable.
        """
        self._name, self._memory_path, self._steps = f"rank_{world.rank}", memory_path, 0
        if memory_path is not None and world.device.type != "cuda":
            raise ConfigError("memory_profiler_path: torch records the memory of CUDA devices only; remove the key")
        for key, path in (("trace_path", trace_path), ("memory_profiler_path", memory_path)):
            if path is not None:
                check_writable(key, path)
        self._trace: profile | None = None
        if trace_path is not None:
            target = trace_path / f"{self._name}.json"
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
            self._trace = profile(
                activities=activities,
                schedule=schedule(wait=_SKIPPED, warmup=_WARMUP, active=_TRACED, repeat=1),
                on_trace_ready=lambda recorded: _export(recorded, target),
                record_shapes=True,
            )
            self._trace.start()
        if memory_path is not None:
            torch.cuda.memory._record_memory_history()

    def step(self) -> None:
        """Count a completed step."""
        self._steps += 1
        if self._trace is not None:
            self._trace.step()
            if self._steps == _LAST_TRACED:
                self.close()
        if self._memory_path is not None and self._steps == _LAST_TRACED:
            target = self._memory_path / f"{self._name}.pickle"
            torch.cuda.memory._dump_snapshot(str(target))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info("wrote a memory snapshot to {}", target)

    def close(self) -> None:
        """Stop a trace that is still recording; it is written if the traced steps were reached."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None


def _export(recorded: profile, target: Path) -> None:
    recorded.export_chrome_trace(str(target))
    logger.info("wrote a trace of {} steps to {}", _TRACED, target)


# Dense FLOP/s in bfloat16 with sums in float32, from the vendors' data sheets, by a pattern of the device's
# name; the first match counts.
_PEAK = {
    r"B300": 2.25e15, r"GB[23]00": 2.5e15, r"B200": 2.25e15,
    r"H200 NVL": 835e12, r"G?H200": 989e12, r"H[18]00 PCIe": 756e12, r"H100 NVL": 835e12, r"H[18]00": 989e12,
    r"H20": 148e12,
    r"A[18]00": 312e12, r"A40": 149.7e12, r"A30": 165e12, r"A10": 125e12, r"A10G": 70e12,
    r"L40S": 362e12, r"L40": 181e12, r"L20": 119.5e12, r"L4": 121e12,
    r"RTX A6000": 154.8e12, r"RTX A5000": 111.1e12, r"RTX 6000 Ada": 364.2e12,
    r"RTX PRO 6000.* Max-Q": 438.9e12, r"RTX PRO 6000": 503.8e12,
    r"RTX 3090$": 71e12, r"RTX 4090$": 165.2e12, r"RTX 5090$": 209.5e12,
    r"MI355X": 2.517e15, r"MI350X": 2.307e15, r"MI3(?:00|25)X": 1307e12, r"MI250X": 191.5e12, r"MI210": 181e12,
}  # fmt: skip
_MATMUL_SIZE = 1024
_MATMUL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward, without recomputation.

    A matrix costs 2 FLOPs per element and token in the forward pass, 2 for the gradient of its input, and unless it is
    frozen 2 for its own gradient.
    """

    body: float  # per token in the blocks' matrices
    head: float  # per trained token; only these meet the output embedding
    # per pair of a token and an earlier token of its segment (causal) inside a window, by the window; 0: full attention
    attention: Mapping[int, float]
    # as `total_upstream` counts them
    upstream_body: float
    upstream_attention: float

    @classmethod
    def of(cls, policy: PolicyModel) -> "ModelFlops":
        """Count the parameters, before or after sharding."""
        config = policy.causal_lm.config.get_text_config()
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        attention: dict[int, float] = {}
        for kind, layer in zip(types, config.per_layer_config, strict=False):  # heads differ in Gemma 4
            heads = getattr(layer, "num_attention_heads", 0)  # Mamba-2 has none
            if heads and kind not in ("linear_attention", "conv", "mlp", "moe"):
                size = window if window and kind == "sliding_attention" else 0
                attention[size] = attention.get(size, 0) + 12 * heads * _head_width(layer)
        active = getattr(config, "num_experts_per_tok", None) or 1
        body = matrices = 0.0
        for block in policy.blocks:
            for name, parameter in block.named_parameters():
                stack = ".experts." in f".{name}." and parameter.ndim == 3  # [experts, out, in]
                share = active / parameter.shape[0] if stack else 1.0
                elements = share * parameter.numel() if parameter.ndim >= 2 and not name.endswith("bias") else 0.0
                matrices += elements
                body += (6 if parameter.requires_grad else 4) * elements
        head = policy.causal_lm.get_output_embeddings().weight
        return cls(
            body=body,
            head=(6 if head.requires_grad else 4) * head.numel(),
            attention=attention,
            upstream_body=6 * (matrices + head.numel()),
            upstream_attention=12 * config.num_hidden_layers * config.hidden_size,
        )

    def total(self, lengths: NDArray[np.integer], scored: int) -> float:
        """FLOPs of segments of `lengths` of which `scored` tokens are trained."""
        tokens = lengths.astype(np.float64)
        attention = 0.0
        for window, flops in self.attention.items():
            outside = np.maximum(tokens - window, 0) ** 2 if window else 0
            attention += flops * (tokens**2 - outside).sum() / 2
        return float(self.body * tokens.sum() + self.head * scored + attention)

    def total_upstream(self, lengths: NDArray[np.integer]) -> float:
        """FLOPs by the formula of upstream prime-rl, to compare with its published MFU.

        All tokens meet the output embedding, attention is full instead of causal, hidden size replaces heads times head
        dimension, and nothing is frozen.
        """
        tokens = lengths.astype(np.float64)
        return float(self.upstream_body * tokens.sum() + self.upstream_attention * (tokens**2).sum())


def _head_width(config: Any) -> float:
    """Mean of the dimensions of a head's keys and values, which differ in multi-head latent attention."""
    if getattr(config, "kv_lora_rank", None):
        return (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device: measured on a CPU; of a GPU in bfloat16 from its data sheet, otherwise None."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = next((peak for part, peak in _PEAK.items() if re.search(rf"\b(?:{part})(?!\w)", name)), None)
        return found if dtype == torch.bfloat16 else None
    # The best of several square matrix products with the threads of training.
    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(_MATMUL_REPEATS):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * _MATMUL_SIZE**3 / best


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated by torch on a GPU, or the resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


MAX_TOKENS = 16384
"""Tokens in one sample, over all ranks: what they exchange has the same size for every batch and number of ranks."""

TokenValues = Callable[[ScoredRow], Mapping[str, Tensor]]
"""Returns values [T] by name for a row; the names are the same for every row."""


class TokenDistributions:
    """Takes a sample of the trained tokens of a step: evenly spaced tokens of each row.

    Args:
        values: the values to sample; they are computed only in steps that `is_due`.
        is_due: whether the values of a step are logged; equal on all ranks.
    """

    def __init__(self, values: TokenValues, world: World, is_due: Callable[[int], bool]) -> None:
        self._values, self._world, self._is_due = values, world, is_due
        self._rows: list[Tensor] = []
        self._names: list[str] = []

    def record(
        self, step: int, num_rows: int, objective: Callable[[ScoredRow], Objective]
    ) -> Callable[[ScoredRow], Objective]:
        """Return `objective`; in steps that are due, it also samples the tokens of each of `num_rows` rows."""
        self._rows.clear()
        if not self._is_due(step):
            return objective
        limit = max(1, self._size // max(1, num_rows))

        def recording(scored: ScoredRow) -> Objective:
            self._add(scored, limit)
            return objective(scored)

        return recording

    def gather(self) -> dict[str, NDArray[np.float64]]:
        """Return the sample of all ranks by name, and forget it; {} in steps that are not due.

        All ranks call it together. Ranks that work on the same rows count once.
        """
        if not self._rows:
            return {}
        world = self._world
        mine = torch.cat(self._rows, dim=1)[:, : self._size].double()
        self._rows.clear()
        everything = torch.zeros(world.data_size, len(self._names), self._size, dtype=torch.float64)
        used = torch.zeros(world.data_size, dtype=torch.int64)
        if world.rank % world.model_parallel_size == 0:
            everything[world.data_rank, :, : mine.shape[1]] = mine.cpu()
            used[world.data_rank] = mine.shape[1]
        everything = world.sum(everything.to(world.device)).cpu()
        counts = world.sum(used.to(world.device)).tolist()
        parts = [everything[rank, :, :count] for rank, count in enumerate(counts)]
        return dict(zip(self._names, torch.cat(parts, dim=1).numpy(), strict=True))

    @property
    def _size(self) -> int:
        """The largest number of tokens from this rank."""
        return max(1, MAX_TOKENS // self._world.data_size)

    @torch.no_grad()
    def _add(self, scored: ScoredRow, limit: int) -> None:
        values = self._values(scored)
        trained = scored.row.loss_mask.nonzero().squeeze(1)
        if len(trained) > limit:
            trained = trained[torch.linspace(0, len(trained) - 1, limit, device=trained.device).long()]
        self._names = list(values)
        self._rows.append(torch.stack([value.detach().float()[trained] for value in values.values()]))


def rl_token_values(scored: ScoredRow) -> dict[str, Tensor]:
    """Return the values of reinforcement learning; the mismatch is NaN after the first update of the step."""
    row = scored.row
    log_ratio = clamped_difference(scored.logprobs, row.sampler_logprobs, row.loss_mask).double()
    mismatch = torch.expm1(log_ratio) - log_ratio
    return {
        **sft_token_values(scored),
        "importance_ratio": log_ratio.exp(),
        "mismatch_kl": mismatch if scored.before_first_update else torch.full_like(mismatch, torch.nan),
        "advantage": row.advantages,
    }


def sft_token_values(scored: ScoredRow) -> dict[str, Tensor]:
    """Return the log-probability and the entropy of each token."""
    return {"logprob": finite(scored.logprobs), "entropy": scored.entropy}
