"""An environment whose code runs in an interpreter of its own (`environment_runner`), beside its worker.

The environment samples from the worker's `PolicyEndpoint`, over the same connection, so every token is recorded here,
with its version. What crosses the connection is examples, messages, rewards and metrics.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import own_name
from prime_rl.core.types import Rollout
from prime_rl.rollouts.agent_box import box_sandbox
from prime_rl.rollouts.agent_function import load_agent
from prime_rl.rollouts.clients.raw_openai_client import PolicyEndpoint
from prime_rl.rollouts.environment_backend import (
    EnvironmentBackend,
    call_parameters,
    load_rewards,
    objects_of,
    refuse_agent,
    refuse_step_rewards,
    score_objects,
)
from prime_rl.rollouts.environment_id import find_own_file
from prime_rl.rollouts.group_attempts import (
    ZERO_HINT,
    Attempt,
    EnvironmentFailed,
    GroupAttempts,
    RolloutTimedOut,
    SampleTooLong,
    UnsupportedEnvironment,
    config_errors,
)
from prime_rl.rollouts.separate.interpreters import module_name
from prime_rl.rollouts.verifiers.classic_client import GivenCredit, RolloutClient, check_scored
from prime_rl.rollouts.verifiers.environment_process import Runner
from prime_rl.rollouts.verifiers.episodes import EpisodeCalls, add_rewards, check_names_differ, run_episodes
from prime_rl.rollouts.verifiers.verifiers_classic import make_rollout, score_rollouts, warn_about_credit

_MAX_CACHED_ROWS = 4096
_REFUSED_OBJECTS = {"state", "task", "trace", "parser", "texts", "prompts", "completions", "answers", "infos", "states"}
"""What reward functions of the configuration can take of environments in this interpreter only."""

_SHOWN_SAMPLING = ("temperature", "top_p", "max_tokens")
"""The run's sampling parameters that the environment sees; the recorder applies all of them."""


class SeparateEnvironment(EnvironmentBackend):
    """One split of an environment that runs in `env.interpreter`."""

    def _load(self) -> None:
        config = self.config
        self._added_rewards = load_rewards(config.rewards, config.id)
        for function, _ in self._added_rewards:
            if refused := sorted(call_parameters(function).names & _REFUSED_OBJECTS):
                raise ConfigError(
                    f"env.rewards of environment {config.id!r}: {function.__name__} takes {refused[0]!r}, which an "
                    "environment with packages of its own does not pass; take text, prompt, completion, answer, info, "
                    "or columns of the example, or add the function to its rubric"
                )
        self._endpoint = PolicyEndpoint()
        self._rows: dict[int, dict[str, Any]] = {}
        self._num_rollouts = 0
        assert config.interpreter is not None, "set where the environment is identified"
        sandbox, agent = box_sandbox(config), load_agent(config, self.warn)
        self._runner = Runner(config.interpreter, self._endpoint, self._count_tokens, sandbox, agent)
        found = find_own_file(config)
        try:
            loaded = self._runner.call_before_serving(
                "load",
                id=module_name(config.id) if found is None else own_name(found.origin),
                path=None if found is None else str(found.origin),
                args=config.args,
                split=self.split,
                runtime=config.runtime,
                command=config.program,
                install=config.how_to_install,
                has_agent=agent is not None,
                counts_zero=config.reward_errors == "zero",
            )
        except (EnvironmentFailed, UnsupportedEnvironment) as error:
            raise ConfigError(
                f"environment {config.id!r} with env.args = {config.args} does not load: {error}"
            ) from error
        self._len, self.eval_split, self._is_classic = loaded["examples"], loaded["eval_split"], loaded["is_classic"]
        (refuse_agent if self._is_classic else refuse_step_rewards)(config)
        if loaded["uses_sandbox"]:
            with config_errors(f"environment {config.id!r} cannot run its agents"):
                sandbox.check()
        for warning in loaded["warnings"]:
            self.warn(*warning)
        if self._len == 0:
            raise ConfigError(f"environment {config.id!r} has no {self.split} examples; check env.args")

    def __len__(self) -> int:
        return int(self._len)

    def prompt_tokens(self, example: int) -> int:
        """Return the length of the first prompt of an example, in tokens."""
        row = self._example(example)
        return self._count_tokens(row["prompt"], row["tools"]) if row["prompt"] else 0

    def describe(self) -> dict[str, Any]:
        """Return what `EnvironmentBackend.describe` says."""
        described: dict[str, Any] = self._runner.call_before_serving("describe")
        return described

    def _row(self, example: int) -> Any:
        return self._example(example)["row"]

    def _example(self, example: int) -> dict[str, Any]:
        if example not in self._rows:
            self._keep_row(example, self._runner.call_before_serving("row", example=example))
        return self._rows[example]

    def _keep_row(self, example: int, row: dict[str, Any]) -> None:
        self._rows[example] = row
        if len(self._rows) > _MAX_CACHED_ROWS:
            del self._rows[next(iter(self._rows))]

    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        row = self._rows.pop(example, None) or await self._runner.call("row", example=example)
        try:
            run = self._run_classic if self._is_classic else self._run_episodes
            return await run(group, row["row"], example, sampling, seq_len)
        finally:
            self._keep_row(example, row)  # after all others: `answer` reads it next

    async def _run_episodes(
        self, group: GroupAttempts, row: Mapping[str, Any], example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        def make_calls(this: Attempt) -> EpisodeCalls:
            return EpisodeCalls(functools.partial(self._recorder, this, seq_len), sampling, self.warn)

        async def run(calls: EpisodeCalls) -> Any:
            async def answer(body: Mapping[str, Any]) -> dict[str, Any]:
                asked = dict(body)
                return await calls.ask(asked.pop("agent"), asked)

            key = self._endpoint.add(answer)
            try:
                return await self._runner.call("run_episode", example=example, api_key=key)
            finally:
                self._endpoint.remove(key)

        async def finish(rollout: Rollout, agent: Mapping[str, Any]) -> Rollout:
            added = await self._score_added(agent["messages"], row)
            return add_rewards(rollout, *added, self._added_rewards)

        return await run_episodes(group, make_calls, run, finish if self._added_rewards else None)

    async def _score_added(
        self, messages: Sequence[Any], row: Mapping[str, Any]
    ) -> tuple[float, dict[str, float], int]:
        """Return what the reward functions of the configuration give to a conversation."""
        zero = self.config.reward_errors == "zero"
        return await score_objects(self._added_rewards, objects_of(messages, row), zero, self.warn)

    async def _run_classic(
        self, group: GroupAttempts, row: Mapping[str, Any], example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        started: list[SeparateRollout] = []

        async def attempt(this: Attempt) -> SeparateRollout:
            self._num_rollouts += 1
            rollout = SeparateRollout(self.warn, self._recorder(this, seq_len), this, sampling, self._endpoint)
            rollout.number = self._num_rollouts
            started.append(rollout)
            try:
                await rollout.run(self._runner, example, seq_len, sampling)
                warn_about_credit(self, rollout.credit)
            except BaseException:
                rollout.end_calls()
                raise
            return rollout

        try:
            score_once = functools.partial(self._score_once, row)
            finished = await score_rollouts(group, await group.run(attempt), score_once)
            return [self._rollout(rollout, seq_len) for rollout in finished]
        finally:
            for rollout in started:
                rollout.release()
            failure = await self._runner.call("release", rollouts=[rollout.number for rollout in started])
            if failure is not None:
                self.warn("cleanup", f"the cleanup of its rubric failed: {failure}")

    async def _score_once(
        self, row: Mapping[str, Any], finished: "list[SeparateRollout]"
    ) -> tuple[dict[int, EnvironmentFailed], bool]:
        try:
            result = await self._runner.call("score", rollouts=[rollout.number for rollout in finished])
        finally:
            for rollout in finished:
                rollout.raise_failure()
        counts_zero = self.config.reward_errors == "zero"
        for rollout, score in zip(finished, result["scores"], strict=True):
            rollout.score = score
            if self.trains:
                check_scored(rollout.credit, with_trajectory(score))
            if counts_zero:
                score["metrics"]["reward_errors"] = 0.0
        failures: dict[int, EnvironmentFailed] = {}
        for failed in result["failures"]:
            name, index = failed["function"], failed["rollout"]
            failure = EnvironmentFailed(failed["message"], bool(failed["infrastructure"]))
            affected = range(len(finished)) if index is None else [index]
            if failed["weight"] == 0:
                self.warn(f"metric {name}", f"{failure}; it has weight 0, so only its metric is missing")
                for each in affected:
                    finished[each].score["metrics"].pop(name, None)
            elif failure.is_infrastructure:
                raise failure
            elif counts_zero:
                self.warn(f"reward {name}", f"{failure}; it counts as 0 (env.reward_errors)")
                for each in affected:
                    finished[each].score["metrics"]["reward_errors"] += 1.0
            elif index is None:
                raise EnvironmentFailed(f"{failure} {ZERO_HINT}")
            else:
                failures.setdefault(index, EnvironmentFailed(f"{failure} {ZERO_HINT}"))
        for index, rollout in enumerate(finished if self._added_rewards else ()):
            try:
                await self._add_rewards(rollout, row)
            except EnvironmentFailed as failure:
                if failure.is_infrastructure:
                    raise
                failures.setdefault(index, failure)
        return failures, bool(result["jointly"])

    async def _add_rewards(self, rollout: "SeparateRollout", row: Mapping[str, Any]) -> None:
        """Add the rewards of the configuration to the score of a classic rollout."""
        messages, score = [*rollout.state["prompt"], *rollout.state["completion"]], rollout.score
        added, values, num_zeros = await self._score_added(messages, row)
        check_names_differ(score["metrics"], values)
        if num_zeros:
            score["metrics"]["reward_errors"] += num_zeros
        score["reward"] += added
        score["metrics"] |= values
        score["weights"] |= {function.__name__: weight for function, weight in self._added_rewards}

    def _rollout(self, rollout: "SeparateRollout", seq_len: int) -> Rollout:
        state, score = rollout.state, rollout.score
        messages = [*state["prompt"], *state["completion"]]
        return make_rollout(self, rollout, seq_len, messages, score, state["is_truncated"], score["weights"])


class SeparateRollout(RolloutClient):
    """One rollout, whose model calls it answers. Its `state` are messages and steps, once it has ended.

    Attributes:
        number: in the other process.
        score: reward and metrics, once it is scored.
    """

    number: int
    score: dict[str, Any]

    async def run(self, runner: Runner, example: int, seq_len: int, sampling: Mapping[str, Any]) -> None:
        """Run it. At its time limit it is scored with its turns so far; see `EnvironmentBackend.run_group`."""
        shown = {name: sampling[name] for name in _SHOWN_SAMPLING if sampling.get(name) is not None}
        call = runner.start_call(
            "rollout",
            rollout=self.number,
            example=example,
            base_url=self.base_url,
            api_key=self.api_key,
            sampling=shown,
        )
        try:
            async with self.attempt.clock:
                result = await runner.finish(call)
        except RolloutTimedOut:
            result = call.answer_after_cancel()
            if result is None:
                raise
        except EnvironmentFailed:
            self.raise_failure()
            if self.recorder.prompt_too_long:
                raise SampleTooLong(f"a prompt does not fit into seq_len = {seq_len}") from None
            raise
        self.end_rollout()
        self.raise_failure()
        self.state = with_trajectory(result)
        self.credit = GivenCredit.read(self.state, self.reply)


def with_trajectory(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with its steps in the form of a state."""
    return {**result, "trajectory": [{**step, "response": {"id": step["id"]}} for step in result["steps"]]}
