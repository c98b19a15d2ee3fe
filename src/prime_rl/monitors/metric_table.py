"""Declared metrics: name, unit and meaning of everything that a process writes to metrics/*.jsonl."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loguru import logger

STRICT_VARIABLE = "PRIME_RL_STRICT_METRICS"
"""Environment variable: 1 makes an undeclared metric an error. The test suite sets it."""

_PLACEHOLDER = re.compile(r"<\w+>")


class UndeclaredMetricError(Exception):
    """A process logged a metric that its table does not declare."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of metrics.

    Attributes:
        name: `area/name` or `area/name/stat`. A placeholder such as `<env>` stands for any text.
        unit: "" for a number without a unit.
        meaning: description for the reference page.
        deprecated: former name with the same placeholders; it is written as well for one release.
    """

    name: str
    unit: str
    meaning: str
    deprecated: str | None = None


class MetricTable:
    """The metrics of `process`, which is also the name of its file. The first matching declaration counts."""

    def __init__(self, process: str, metrics: Sequence[Metric]) -> None:
        self.process, self.metrics = process, tuple(metrics)
        self._patterns = [(_pattern(metric.name), metric) for metric in metrics]
        self._old_names: dict[str, str | None] = {}

    def find(self, name: str) -> Metric | None:
        """The declaration of a metric; None if there is none."""
        return next((metric for pattern, metric in self._patterns if pattern.fullmatch(name)), None)

    def old_name(self, name: str) -> str | None:
        """The deprecated name of a metric, its placeholders filled in; None if it has none."""
        metric = self.find(name)
        if metric is None or metric.deprecated is None:
            return None
        values = iter(_pattern(metric.name).fullmatch(name).groups())  # type: ignore[union-attr]
        return _PLACEHOLDER.sub(lambda _: next(values), metric.deprecated)

    def add_deprecated(self, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """Check that all metrics are declared, and add those with a deprecated name under that name too.

        Raises:
            UndeclaredMetricError: a metric is not declared, and `PRIME_RL_STRICT_METRICS` is 1. Otherwise a warning is
                logged once per name.
        """
        complete = dict(metrics)
        for name, value in metrics.items():
            if name not in self._old_names:
                if self.find(name) is None:
                    where = "prime_rl/monitors/metric_table.py"
                    text = f"metric {name!r} of {self.process} is not declared; add it to {where}"
                    if os.environ.get(STRICT_VARIABLE) == "1":
                        raise UndeclaredMetricError(text)
                    logger.warning(text)
                self._old_names[name] = self.old_name(name)
            if (old := self._old_names[name]) is not None:
                complete[old] = value
        return complete

    def read(self, row: Mapping[str, Any], name: str, default: Any = None) -> Any:
        """Read a metric from a line of the process's file; also from a run that wrote its deprecated name."""
        return row.get(name, row.get(self.old_name(name) or name, default))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, _PLACEHOLDER.split(name))))


_EVALUATION_METRICS = (
    Metric("failed", "", "1 if the evaluation ended early with an error"),
    Metric("time_s", "s", "duration of the evaluation"),
    Metric("skipped", "versions", "total of the due evaluations that a newer version replaced"),
    Metric("held_s", "s", "total time for which weight updates waited for a pinned evaluation"),
    Metric("<env>/failed", "", "1 if the evaluation of the environment failed"),
    Metric("<env>/examples", "examples", "examples with a result"),
    Metric("<env>/rollouts", "rollouts", "rollouts with a result"),
    Metric("<env>/errors", "examples", "examples that failed"),
    Metric("<env>/errors/<kind>", "examples", "examples that failed, by kind of failure"),
    Metric("<env>/reward/mean", "", "mean over the examples of the mean reward of their rollouts"),
    Metric("<env>/reward/mean_if_failed_is_0", "", "the same with 0 for failed examples; only if there are any"),
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
    return [replace(metric, name=f"{prefix}/{metric.name}") for metric in _EVALUATION_METRICS]


EVALUATION = MetricTable("eval", evaluation_metrics("eval"))
"""Metrics of evaluations: `eval` writes metrics/eval.jsonl, online evaluations metrics/orchestrator.jsonl.

Each evaluation is one line, and its `step` is the evaluated version.
"""


_TRAINER_METRICS = (
    Metric("loss", "", "mean over the minibatches of the step; for sft the cross-entropy in nats"),
    Metric(
        "loss/<part>",
        "",
        "rl: a part of `loss`, if it has several: `rl`, `kl` and `entropy` (with factor), `ce`, `ref_kl`",
    ),
    Metric("grad_norm", "", "gradient norm before clipping, mean over the minibatches"),
    Metric("grad_norm/layer_<n>", "", "gradient norm of block n before clipping, every `grad_norm_interval` steps"),
    Metric(
        "grad_norm/<role>",
        "",
        "the same for a role: `embedding`, `attention`, `mlp`, `norm`, `unembedding`, `adapter`, `other`",
    ),
    Metric("lr", "", "learning rate of the step"),
    Metric("lr/<role>", "", "learning rate of parameters with their own peak: `embedding`, `unembedding`, `matrix`"),
    Metric("optim/skipped", "minibatches", "minibatches without an optimizer step because a value was not finite"),
    Metric("logprob/mean", "nats", "rl: mean logprob of the trained tokens under the policy"),
    Metric("entropy", "nats", "entropy of the policy at the sampling temperature"),
    Metric("entropy/<quantile>", "nats", "quantile of the entropy over the tokens: `q05`, `q25`, `q50`, `q75`, `q95`"),
    Metric("mismatch_kl", "nats", "rl: k3 estimate of KL(sampler, trainer), before the first update of the step"),
    Metric("mismatch_kl/on_policy", "nats", "rl: `mismatch_kl` over samples that version n generated completely"),
    Metric("mismatch_kl/env/<env>", "nats", "rl: `mismatch_kl` over an environment, if the batch has several"),
    Metric("mismatch_kl/server/<server>", "nats", "rl: `mismatch_kl` over an inference server, if there are several"),
    Metric("mismatch_kl/on_policy/env/<env>", "nats", "rl: `mismatch_kl/on_policy` over an environment"),
    Metric("mismatch_kl/on_policy/server/<server>", "nats", "rl: `mismatch_kl/on_policy` over an inference server"),
    Metric("mismatch_logprob/on_policy", "nats", "rl: mean absolute difference of the logprobs of the same tokens"),
    Metric("time/wait_for_turn", "s", "several runs: from the arrival of the batch until its first row is processed"),
    Metric("runs/active", "", "several runs, totals: runs with a slot after the iteration"),
    Metric("runs/waiting", "", "several runs, totals: runs that wait for a slot"),
    Metric("runs/in_iteration", "", "several runs, totals: runs with rows in the iteration"),
    Metric("importance_ratio/mean", "", "rl: mean of trainer probability / sampler probability"),
    Metric("importance_ratio/clipped", "share", "rl: tokens whose gradient the loss clips, low or high"),
    Metric("importance_ratio/clipped_low", "share", "rl: clipped tokens whose ratio (dppo: probability) is too low"),
    Metric(
        "importance_ratio/clipped_high",
        "share",
        "rl: clipped tokens whose ratio (dppo: probability) is too high; cispo, tis: weight at its bound",
    ),
    Metric("importance_ratio/masked", "share", "rl: tokens that the loss masks (dppo, icepop)"),
    Metric("kl/reference", "nats", "rl: estimate of the KL divergence from the reference model, with `loss.kl`"),
    Metric(
        "sampling_mask/outside_trainer_mask",
        "share",
        "rl: tokens sampled with top-k, top-p or min-p that the policy's own truncation would exclude",
        "truncation/left_out",
    ),
    Metric("moe/max_violation", "", "largest load of an expert / mean load - 1, mean over the layers; 0 is balanced"),
    Metric("moe/idle_experts", "share", "experts without a token, mean over the layers"),
    Metric("moe/routing_confidence", "share", "share of the heaviest chosen expert in the weight of all chosen ones"),
    Metric("routing/replayed", "share", "rl: with `model.router_replay`, choices of experts taken from the sampler"),
    Metric("routing/disagreement", "share", "rl: recorded experts that the trainer's router would not have chosen"),
    Metric("val/loss", "nats", "sft: loss on the validation set, in a separate line whose `step` is the version"),
    Metric("progress/step", "steps", "steps since the beginning of the run, also after a resume"),
    Metric("progress/tokens", "tokens", "tokens of these steps, prompts included"),
    Metric("progress/samples", "samples", "samples of these steps"),
    Metric("progress/problems", "groups", "rl: groups of these steps"),
    Metric("world_size", "ranks", "number of ranks"),
    Metric("tokens", "tokens", "tokens of the batch, prompts included"),
    Metric("time/step", "s", "duration of the step"),
    Metric("time/wait_for_batch", "s", "rl: wait for the batch and reading it"),
    Metric("time/load_data", "s", "sft: wait for the rows of the step"),
    Metric("time/synchronize", "s", "part of `time/train`: wait for the slowest rank after the backward passes"),
    Metric(
        "time/busy",
        "s",
        "part of `time/step` in which rank 0 waited neither for data or other runs nor in `time/synchronize`; waits in "
        "gathers of FSDP count as busy, so ranks that gather parameters hide nearly all of their differences",
    ),
    Metric(
        "time/<part>/rank_<stat>", "s", "mean, min, lower median, max over the ranks of `step`, `busy` and the waits"
    ),
    Metric("rank/slowest", "", "rank with the largest `time/busy`; a heartbeat names its host (`doctor`)"),
    Metric("rank/slowdown", "", "its `time/busy` / the lower median of the ranks; 1 is balanced"),
    Metric("time/train", "s", "forward, backward and update"),
    Metric("time/publish", "s", "start of a publication, in steps that publish"),
    Metric("time/publish_wait", "s", "part of `time/publish`: wait until the previous version is complete"),
    Metric("time/val", "s", "sft: duration of a validation"),
    Metric("weight_sync/canary", "s", "part of `time/publish`: forward pass of the canary", "publish/canary"),
    Metric("weight_sync/copy_wait", "s", "part of `time/train`: wait for the copy of the weights", "publish/copy_wait"),
    Metric("weight_sync/seconds", "s", "duration of the latest complete publication", "publish/seconds"),
    Metric("weight_sync/bytes", "bytes", "size of the latest complete publication", "publish/bytes"),
    Metric("perf/tokens_per_second", "tokens/s", "`tokens` / `time/train`"),
    Metric("perf/mfu", "share", "model FLOPs / `time/train` / peak FLOPs of all ranks; null on a GPU of unknown peak"),
    Metric("perf/mfu_simple", "share", "`perf/mfu` if all tokens had full attention and logits", "perf/mfu_upstream"),
    Metric("perf/peak_memory_gib/rank_<stat>", "GiB", "mean, min, lower median, max over the ranks"),
    Metric("perf/peak_memory_gib", "GiB", "peak memory of rank 0: allocated by torch on CUDA, resident on a CPU"),
)
TRAINER = MetricTable("trainer", _TRAINER_METRICS)
"""Metrics of the trainer (`rl` and `sft`): one line per step in metrics/trainer.jsonl.

Means are over the trained tokens of all ranks unless stated otherwise. A metric without a value is null.
"""


_ORCHESTRATOR_METRICS = (
    Metric("reward/mean", "", "mean over the rollouts of the batch"),
    Metric("reward/std", "", "standard deviation over the rollouts of the batch"),
    Metric("reward/min", "", "smallest reward of the batch"),
    Metric("reward/max", "", "largest reward of the batch"),
    Metric("reward/sampled/mean", "", "mean over all rollouts that ended since the last batch, also of dropped groups"),
    Metric("reward/<env>/mean", "", "mean over the rollouts of an environment in the batch"),
    Metric("env/<env>/batch_share", "share", "groups of the environment in the batch"),
    Metric("env/<env>/groups", "groups", "groups of the environment in the batch"),
    Metric("env/<env>/zero_advantage_groups", "share", "the environment's groups in the batch without a gradient"),
    Metric("env/<env>/reward/std", "", "standard deviation over the environment's rollouts in the batch"),
    Metric("env/<env>/reward/min", "", "smallest reward of the environment in the batch"),
    Metric("env/<env>/reward/max", "", "largest reward of the environment in the batch"),
    Metric("env/<env>/completion_len/mean", "tokens", "mean number of sampled tokens of the environment's rollouts"),
    Metric("env/<env>/is_truncated/mean", "share", "`is_truncated/mean` of the environment"),
    Metric("env/<env>/metrics/<name>", "", "`metrics/<name>` of the environment"),
    Metric("env/<env>/time/environment", "s", "mean time of a finished rollout in the environment, engine excluded"),
    Metric("env/<env>/time/engine", "s", "mean time that a finished rollout waited for completions"),
    Metric("env/<env>/time/scoring", "s", "mean time for scoring, if it is apart from the rollout (classic verifiers)"),
    Metric("pass@<k>", "share", "unbiased estimate over the sampled groups: solved by at least one of k rollouts"),
    Metric("groups/solved_all", "share", "sampled groups whose rollouts all reach `pass_threshold`"),
    Metric("groups/solved_none", "share", "sampled groups of which no rollout reaches `pass_threshold`"),
    Metric("metrics/<name>", "", "mean of a metric that the environment measures besides the reward"),
    Metric("advantage/mean", "", "mean over the rollouts of the batch, or over their parts with a reward each"),
    Metric("advantage/std", "", "standard deviation over the same"),
    Metric("advantage/min", "", "smallest advantage of the batch"),
    Metric("advantage/max", "", "largest advantage of the batch"),
    Metric("sampler_logprob/mean", "nats", "mean logprob of the trained tokens when they were sampled"),
    Metric("progress/step", "steps", "batches shipped since the beginning of the run"),
    Metric("progress/tokens", "tokens", "tokens in them, prompts included"),
    Metric("progress/samples", "samples", "samples in them"),
    Metric("progress/problems", "groups", "groups in them"),
    Metric("batch/zero_advantage_groups", "share", "groups of the batch with equal rewards, which have no gradient"),
    Metric("batch/zero_advantage_filler", "groups", "filler groups: they have no gradient", "batch/filled_degenerate"),
    Metric("batch/uncompared_tokens", "share", "tokens of turns or agents without a counterpart: no gradient"),
    Metric("batch/rollouts_per_group", "rollouts", "mean group size; `env.min_rollouts` permits smaller groups"),
    Metric("staleness/max", "versions", "largest n - version of a sampled token; at most k"),
    Metric("staleness/mean", "versions", "mean of n - version over the sampled tokens"),
    Metric("samples/per_rollout", "samples", "mean number of samples of a rollout"),
    Metric(
        "samples/per_branch",
        "samples",
        "samples / branches of the conversations; above 1: turns began a sample though the agent only continued",
    ),
    Metric(
        "samples/false_forks/<cause>",
        "samples",
        "such turns by cause: `repeated` request, `cut` reply, another `system` prompt, other `tools`, `form` (white "
        "space, reasoning), `rendering` of the template",
    ),
    Metric("samples/tokens_trained_twice", "tokens", "sampled tokens that are trained in two samples; 0"),
    Metric("seq_len/mean", "tokens", "mean length of a sample, prompt and completion"),
    Metric("seq_len/min", "tokens", "smallest length of a sample, prompt and completion"),
    Metric("seq_len/max", "tokens", "largest length of a sample, prompt and completion"),
    Metric("completion_len/mean", "tokens", "mean number of sampled tokens of a rollout"),
    Metric("completion_len/min", "tokens", "smallest number of sampled tokens of a rollout"),
    Metric("completion_len/max", "tokens", "largest number of sampled tokens of a rollout"),
    Metric("is_truncated/mean", "share", "rollouts with a turn that reached `max_tokens`, or that reached `seq_len`"),
    Metric("packing/rows", "rows", "packed rows of the batch"),
    Metric("packing/fill", "share", "tokens / (rows * `seq_len`)"),
    Metric("time/step", "s", "time since the last batch"),
    Metric("time/wait_for_policy", "s", "part of `time/step`: no group in flight until the next version"),
    Metric("time/wait_for_pause", "s", "part of `time/step`: no group in flight while an environment or server pauses"),
    Metric("time/weight_update", "s", "duration of the latest weight update, seen by the orchestrator", "time/switch"),
    Metric(
        "time/weight_update_stage", "s", "part of the update: the slowest server reads the weights", "time/switch_stage"
    ),
    Metric("time/weight_update_swap", "s", "part of the update: all servers replace the weights", "time/switch_place"),
    Metric("time/weight_update_pause", "s", "longest pause of sampling on a server in the update", "time/switch_pause"),
    Metric("weights/versions_skipped", "versions", "published versions that were never sampled from", "policy/skipped"),
    Metric("policy/version", "version", "oldest version that a server samples from"),
    Metric("policy/refused", "versions", "published versions that inference rejected (`on_invalid_weights`)"),
    Metric("canary/max_logprob_difference", "nats", "largest difference of inference and trainer on 64 fixed tokens"),
    Metric("perf/rollouts_per_second", "1/s", "rollouts completed since the last batch / `time/step`"),
    Metric("perf/tokens_per_second", "tokens/s", "tokens of the rollouts completed since the last batch / `time/step`"),
    Metric("tokens/sampled", "tokens", "total of all tokens that inference sampled"),
    Metric("tokens/shipped", "tokens", "total of the tokens in batches"),
    Metric("tokens/dropped", "tokens", "total of the tokens of complete groups that were dropped"),
    Metric("tokens/held", "tokens", "tokens of complete groups that wait for a later batch"),
    Metric("tokens/unaccounted", "tokens", "sampled tokens that no other counter accounts for; 0", "tokens/wasted"),
    Metric(
        "tokens/lost/<reason>",
        "tokens",
        "total of the tokens of incomplete rollouts: `retried` (restarted alone), `failed` (their group failed), "
        "`replayed` (worker or server lost), `cancelled` (with their group), `unused` (calls outside the turns)",
    ),
    Metric("rollouts/<reason>", "rollouts", "total of the incomplete rollouts, reasons as in `tokens/lost/<reason>`"),
    Metric(
        "dropped/error/<env>",
        "groups",
        "total of the groups dropped because the environment failed; `engine`: because inference rejected the request",
        "error/<env>",
    ),
    Metric(
        "dropped/<reason>",
        "groups",
        "total of the groups dropped for a reason: `zero_advantage`, `overlong`, `filter/difficulty`, `resampled`",
    ),
    Metric("groups/ended", "groups", "total of the groups that ended: kept, filtered out or failed"),
    Metric("groups/failed", "groups", "total of the groups that ended with an error"),
    Metric("groups/retried", "groups", "total of the restarts of groups whose server failed"),
    Metric("failing_seconds/<env>", "s", "how long the environment has returned errors only; 0 while it works"),
    Metric("stream/<env>/epoch", "", "passes over the examples of an environment"),
    Metric("stream/<env>/fallbacks", "draws", "draws from another difficulty pool because the chosen one was empty"),
    Metric("stream/<env>/passed_turns", "draws", "total of the draws given to others because this one failed"),
    Metric("stream/<env>/seen", "examples", "examples with a result, of a curriculum"),
    Metric("stream/<env>/<pool>", "examples", "size of a difficulty pool: `easy`, `normal` or `hard`"),
    Metric("event_loop_lag/<stat>", "s", "delay of the timers of this process: `median`, `p99` (percentile), `max`"),
    Metric("env_workers/restarts", "restarts", "total of the replaced environment workers", "workers/deaths"),
    Metric("env_workers/memory_gib", "GiB", "resident memory of the workers of the training environments"),
    Metric("inference/in_flight", "rollouts", "rollouts that the servers sample when the batch is written"),
    Metric("inference/concurrency_limit", "rollouts", "limit of `inference/in_flight`; null without a limit"),
    Metric("inference/kv_usage/mean", "share", "KV cache in use, mean over the servers, at the last reading"),
    Metric("inference/kv_usage/max", "share", "KV cache in use on the fullest server, at the last reading"),
    Metric("inference/requests_running", "requests", "requests in the batches of all servers, at the last reading"),
    Metric("inference/accepted_per_draft", "tokens", "draft tokens that a step accepts, with speculative decoding"),
    Metric("inference/requests_waiting", "requests", "requests that wait on all servers, at the last reading"),
    Metric("inference/preemptions", "requests", "requests that the servers preempted since their start"),
    Metric("inference/servers_removed", "servers", "total of the servers removed after a failure", "servers/deaths"),
    *evaluation_metrics("eval"),
    *evaluation_metrics("val"),
)
ORCHESTRATOR = MetricTable("orchestrator", _ORCHESTRATOR_METRICS)
"""Metrics of the orchestrator: one line per batch in metrics/orchestrator.jsonl, and one per online evaluation.

Totals count from the start of the orchestrator process: after a restart they begin at 0 again. `progress/` does not.
"""

METRIC_TABLES = {table.process: table for table in (TRAINER, ORCHESTRATOR, EVALUATION)}
