"""Metrics of the runs in Prometheus' text format, served at /metrics of the page."""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.page.run_data.metric_series import MetricFile, Series
from prime_rl.page.run_data.run_view import RunView

Family = CounterMetricFamily | GaugeMetricFamily
GAUGES = {
    "prime_rl_policy_lag_versions": ("orchestrator", "staleness/mean", "Mean staleness of the latest batch"),
    "prime_rl_policy_lag_max_versions": ("orchestrator", "staleness/max", "Largest staleness of the latest batch"),
    "prime_rl_truncated_ratio": (
        "orchestrator",
        "is_truncated/mean",
        "Share of truncated rollouts, latest batch",
    ),
    "prime_rl_switch_seconds": ("orchestrator", "time/weight_update", "Duration of the latest weight update"),
    "prime_rl_mismatch_kl_nats": ("trainer", "mismatch_kl", "KL divergence of sampler and trainer in the latest step"),
    "prime_rl_entropy_nats": ("trainer", "entropy", "Entropy of the policy in the latest step"),
    "prime_rl_gradient_norm": ("trainer", "grad_norm", "Gradient norm of the latest step before clipping"),
    "prime_rl_loss": ("trainer", "loss", "Loss of the latest step"),
    "prime_rl_step_seconds": ("trainer", "time/step", "Duration of the latest step"),
    "prime_rl_model_flops_ratio": ("trainer", "perf/mfu", "Model FLOPs utilisation of the latest step"),
}
"""Gauges that are one metric each: name -> process, metric, help."""


class RunCollector(Collector):
    """Collects the metrics of some runs from their directories at each scrape."""

    def __init__(self, runs: Sequence[RunView]) -> None:
        self._runs = runs

    def collect(self) -> Iterable[Family]:
        """Yield one family per metric, with a sample per run."""
        families: dict[str, Family] = {}
        for run in self._runs:
            for kind, name, text, labels, value in _samples(run):
                labels = {"run": run.name, **labels}
                if name not in families:
                    families[name] = kind(name, text, labels=list(labels))
                families[name].add_metric([labels[key] for key in labels], value)
        return list(families.values())


def prometheus_text(runs: Sequence[RunView]) -> bytes:
    """The metrics of all runs."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(runs))
    return generate_latest(registry)


def _samples(run: RunView) -> Iterator[tuple[type[Family], str, str, dict[str, str], float]]:
    metrics = run.read_metrics()
    orchestrator, trainer = metrics["orchestrator"], metrics["trainer"]
    if (steps := trainer.series.get("time/step")) is not None:
        yield GaugeMetricFamily, "prime_rl_step", "Steps that the trainer has finished", {}, steps.steps[-1] + 1
    for name, (process, metric, text) in GAUGES.items():
        if (value := _last(metrics[process], metric)) is not None:
            yield GaugeMetricFamily, name, text, {}, value
    for metric, series in orchestrator.series.items():
        area, _, rest = metric.partition("/")
        if area == "reward" and rest.endswith("/mean") and len(series) and rest != "sampled/mean":
            env = rest.removesuffix("/mean")
            text = "Mean reward of the latest batch"
            yield GaugeMetricFamily, "prime_rl_reward_mean", text, {"env": env}, series.values[-1]
    text = "Tokens that inference sampled, and tokens that the trainer trained on"
    if (sampled := _last(orchestrator, "tokens/sampled")) is not None:
        yield CounterMetricFamily, "prime_rl_tokens", text, {"role": "inference"}, sampled
    if (trained := trainer.series.get("tokens")) is not None:
        yield CounterMetricFamily, "prime_rl_tokens", text, {"role": "trainer"}, sum(trained.values)
    yield from _waits(run, orchestrator.series, trainer.series)
    now = time.time()
    for name, beat in read_heartbeats(run.paths).items():
        text = "Seconds since the last heartbeat"
        age = max(0.0, now - beat.touched / 1e9)  # the clock of the writer's host may differ
        yield GaugeMetricFamily, "prime_rl_heartbeat_age_seconds", text, {"process": name}, age


def _waits(
    run: RunView, orchestrator: dict[str, Series], trainer: dict[str, Series]
) -> Iterator[tuple[type[Family], str, str, dict[str, str], float]]:
    """Waits from the timeline; without one, those that the metrics contain."""
    name, text = "prime_rl_wait_seconds", "Seconds that a process waited for another one"
    found = False
    for lane in run.read_timeline().lanes.values():
        for role, seconds in lane.totals(float("-inf"), float("inf"))["waits"].items():
            found = True
            yield CounterMetricFamily, name, text, {"process": lane.name, "waiting_for": role}, seconds
    if found:
        return
    for process, role, series in (
        ("trainer", "orchestrator", trainer.get("time/wait_for_batch")),
        ("orchestrator", "trainer", orchestrator.get("time/wait_for_policy")),
    ):
        if series is not None:
            labels = {"process": process, "waiting_for": role}
            yield CounterMetricFamily, name, text, labels, sum(series.values)


def _last(file: MetricFile, name: str) -> float | None:
    series = file.series.get(name)
    return series.values[-1] if series is not None and len(series) else None
