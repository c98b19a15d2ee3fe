"""Environments of the verifiers v1 API in a worker; see `TasksetAdapter`."""

import asyncio
import functools
import sys
from collections.abc import Mapping
from typing import Any

from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.types import Rollout
from prime_rl.rollouts.agent_box import AgentBox, box_sandbox
from prime_rl.rollouts.agent_function import load_agent
from prime_rl.rollouts.environment_backend import (
    EnvironmentBackend,
    load_rewards,
    objects_of,
    refuse_step_rewards,
    score_objects,
)
from prime_rl.rollouts.group_attempts import (
    Attempt,
    EnvironmentFailed,
    GroupAttempts,
    UnsupportedEnvironment,
    config_errors,
)
from prime_rl.rollouts.separate.taskset_adapter import TasksetAdapter, check_taskset
from prime_rl.rollouts.separate.values import Failed, Refused
from prime_rl.rollouts.verifiers.episodes import EpisodeCalls, add_rewards, run_episodes


class TasksetEnvironment(EnvironmentBackend):
    """One v1 taskset. A taskset has no splits, so `split` does not select tasks."""

    def _load(self) -> None:
        config = self.config
        refuse_step_rewards(config)
        problem = (
            f"environment {config.id!r} with env.args = {config.args} does not load, neither by load_environment() "
            "nor as a taskset"
        )

        async def count_tokens(messages: list[Any], tools: list[Any] | None) -> int:
            return self._count_tokens(messages, tools)

        with config_errors(problem), translate_error(Refused, lambda error: ConfigError(str(error))):
            check_taskset(sys.modules[self.module])
            sandbox = box_sandbox(config)
            self._adapter = TasksetAdapter(
                self.module,
                config.args,
                config.runtime,
                functools.partial(AgentBox, sandbox),
                count_tokens,
                config.program,
                load_agent(config, self.warn),
                config.reward_errors == "zero",
                config.how_to_install,
            )
            if self._adapter.uses_sandbox:
                sandbox.check()
        if not len(self._adapter):
            raise ConfigError(f"taskset {config.id!r} has no tasks; check env.args")
        for warning in self._adapter.warnings:
            self.warn(*warning)
        self._added_rewards = load_rewards(config.rewards, config.id)

    def __len__(self) -> int:
        return len(self._adapter)

    def prompt_tokens(self, example: int) -> int:
        """Return the length of a task's prompt in tokens, without additions of the harness; 0 without a prompt."""
        prompt = self._adapter.prompt(example)
        return self._count_tokens(prompt) if prompt else 0

    def describe(self) -> dict[str, Any]:
        """Return what `EnvironmentBackend.describe` says."""
        described = asyncio.run(self._adapter.describe())
        added = {function.__name__: weight for function, weight in self._added_rewards}
        return {**described, "rewards": described["rewards"] | added}

    def _row(self, example: int) -> Any:
        return self._adapter.tasks[example].data

    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        def make_calls(this: Attempt) -> EpisodeCalls:
            return EpisodeCalls(functools.partial(self._recorder, this, seq_len), sampling, self.warn)

        async def run(calls: EpisodeCalls) -> dict[str, Any]:
            with (
                translate_error(Failed, lambda error: EnvironmentFailed(str(error))),
                translate_error(Refused, lambda error: UnsupportedEnvironment(str(error))),
            ):
                return await self._adapter.episode(example, calls.ask)

        return await run_episodes(group, make_calls, run, self._add_rewards if self._added_rewards else None)

    async def _add_rewards(self, rollout: Rollout, agent: Mapping[str, Any]) -> Rollout:
        """Return the rollout with the rewards that the configuration adds."""
        zero = self.config.reward_errors == "zero"
        trace = agent["trace"]
        task = trace.task.data
        row = {name: getattr(task, name) for name in ("answer", "info") if hasattr(task, name)}
        objects = {**objects_of(trace.messages, row), "state": trace.state, "task": task, "trace": trace}
        added = await score_objects(self._added_rewards, objects, zero, self.warn)
        return add_rewards(rollout, *added, self._added_rewards)
