"""Metrics of evaluations: `eval` writes metrics/eval.jsonl, online evaluations metrics/orchestrator.jsonl.

Each evaluation is one line, and its `step` is the evaluated version.
"""

from dataclasses import replace

from prime_rl.monitors.metric_table import Metric, MetricTable

_METRICS = (
    Metric("failed", "", "1 if the evaluation ended early with an error"),
    Metric("time_s", "s", "duration of the evaluation"),
    Metric("skipped", "versions", "total of the due evaluations that were skipped because a newer version was due"),
    Metric("held_s", "s", "total time for which weight updates waited for a pinned evaluation"),
    Metric("<env>/failed", "", "1 if the evaluation of the environment failed"),
    Metric("<env>/examples", "examples", "examples with a result"),
    Metric("<env>/rollouts", "rollouts", "rollouts with a result"),
    Metric("<env>/errors", "examples", "examples that failed"),
    Metric("<env>/errors/<kind>", "examples", "examples that failed, by kind of failure"),
    Metric("<env>/reward/mean", "", "mean over the examples of the mean reward of their rollouts"),
    Metric("<env>/reward/std", "", "standard deviation over the rollouts"),
    Metric("<env>/reward/stderr", "", "standard error of `reward/mean`; examples count as independent"),
    Metric("<env>/avg@<n>", "", "mean reward with n rollouts per example"),
    Metric("<env>/pass@<k>", "share", "unbiased estimate: examples solved by at least one of k rollouts"),
    Metric("<env>/pass^<k>", "share", "unbiased estimate: examples solved by all of k rollouts"),
    Metric("<env>/pass@<k>/<bound>", "share", "95 % Wilson interval of pass@k over examples: ci95_low, ci95_high"),
    Metric("<env>/pass^<k>/<bound>", "share", "95 % Wilson interval of pass^k over examples: ci95_low, ci95_high"),
    Metric("<env>/reward/ci95_low", "", "lower end of the 95 % confidence interval of `reward/mean`"),
    Metric("<env>/reward/ci95_high", "", "upper end of the 95 % confidence interval of `reward/mean`"),
    Metric("<env>/maj@<n>", "share", "examples whose most frequent answer of n is correct (`majority_pattern`)"),
    Metric("<env>/by/<column>/<value>/examples", "examples", "examples with this value of a column (`env.breakdown`)"),
    Metric("<env>/by/<column>/<value>/reward/mean", "", "mean over these examples of their mean rewards"),
    Metric("<env>/by/<column>/<value>/pass@1", "share", "rollouts of these examples that pass, averaged over examples"),
    Metric("<env>/is_truncated/mean", "share", "rollouts that reached a limit of tokens"),
    Metric("<env>/completion_len/mean", "tokens", "mean number of sampled tokens of a rollout"),
    Metric("<env>/completion_len/max", "tokens", "largest number of sampled tokens of a rollout"),
    Metric("<env>/metrics/<name>", "", "mean of a metric that the environment measures besides the reward"),
    Metric("<env>/version/min", "version", "oldest version that sampled a token of the evaluation"),
    Metric("<env>/version/max", "version", "newest version that sampled a token of the evaluation"),
)


def evaluation_metrics(prefix: str) -> list[Metric]:
    """Declare the metrics of evaluations that are logged under `prefix`: `eval` or `val`."""
    return [replace(metric, name=f"{prefix}/{metric.name}") for metric in _METRICS]


EVALUATION = MetricTable("eval", evaluation_metrics("eval"))
