"""Resolves a configuration to evaluation tasks: which environments and benchmarks to run, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prime_rl.configs.rollouts.eval_common import EvalEnvConfig
from prime_rl.configs.shared.blocks import SamplingConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.evaluation.benchmarks import benchmark_environment


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One environment and how it is evaluated: `rollouts` of each of `num_examples` examples, -1 takes all."""

    env: EvalEnvConfig
    sampling: SamplingConfig
    num_examples: int
    rollouts: int

    @property
    def name(self) -> str:
        """The environment's name in metrics and file names."""
        return self.env.label


def plan_tasks(
    environments: Sequence[EvalEnvConfig],
    benchmarks: Sequence[str],
    sampling: SamplingConfig,
    num_examples: int,
    rollouts: int,
    rollouts_per_benchmark: Sequence[int] = (),
    benchmark_data: Path | None = None,
) -> list[EvalTask]:
    """Return the tasks, environments first. The settings of an environment take precedence over the common ones.

    Raises ConfigError also if there is no environment, two have the same name, or a benchmark is not installed.
    """
    counts: Sequence[int | None] = rollouts_per_benchmark or [None] * len(benchmarks)
    configs = [*environments, *map(benchmark_environment, benchmarks, counts, [benchmark_data] * len(benchmarks))]
    if not configs:
        raise ConfigError("no environment to run; name one with --env.id")
    labels = [env.label for env in configs]
    if duplicates := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f"two environments are called {duplicates.pop()!r}; give one of them another env.name")
    return [
        EvalTask(
            env=env,
            sampling=_merge_sampling(env, sampling),
            num_examples=num_examples if env.num_examples is None else env.num_examples,
            rollouts=rollouts if env.rollouts_per_example is None else env.rollouts_per_example,
        )
        for env in configs
    ]


def choose_examples(available: int, wanted: int, seed: int) -> list[int]:
    """Choose `wanted` of `available` examples by seed, in ascending order; -1 or too many takes all.

    With the same seed, a larger choice contains every smaller one.
    """
    if wanted < 0 or wanted >= available:
        return list(range(available))
    return sorted(np.random.default_rng(seed).permutation(available)[:wanted].tolist())


def _merge_sampling(env: EvalEnvConfig, sampling: SamplingConfig) -> SamplingConfig:
    with translate_error(ValueError, lambda error: ConfigError(str(error))):
        return env.sampling_with(sampling)
