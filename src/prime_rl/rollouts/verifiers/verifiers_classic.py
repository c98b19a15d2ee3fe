"""Environments of the classic verifiers API.

Verifiers runs the turns and the rubric. It calls the model through `RolloutClient`. Failures that verifiers counts as a
reward of 0 raise here.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import verifiers as vf
from pydantic import ValidationError

from prime_rl.core.errors import ConfigError
from prime_rl.core.types import Rollout
from prime_rl.rollouts.clients.policy_endpoint import PolicyEndpoint
from prime_rl.rollouts.clients.raw_openai_client import replies_in
from prime_rl.rollouts.environment_backend import EnvironmentBackend
from prime_rl.rollouts.group_attempts import Attempt, GroupAttempts
from prime_rl.rollouts.group_failures import (
    EnvironmentFailed,
    RolloutTimedOut,
    SampleTooLong,
    as_number,
    config_errors,
    contain_failures,
    environment_failure,
)
from prime_rl.rollouts.rendering.messages import normalise
from prime_rl.rollouts.replies import Reply
from prime_rl.rollouts.trajectory_merging import Mask
from prime_rl.rollouts.verifiers import classic_patches, rubrics
from prime_rl.rollouts.verifiers.added_rewards import check_names, load_rewards
from prime_rl.rollouts.verifiers.classic_client import RolloutClient, is_whole, tool_definition
from prime_rl.rollouts.verifiers.step_credits import GivenCredit, check_scored

Row = Mapping[str, Any]

_UNUSED_HOOKS = ("_run_rollout_state", "_run_group_states")


class ClassicEnvironment(EnvironmentBackend):
    """One classic environment."""

    def _load(self) -> None:
        classic_patches.apply()
        self._endpoint = PolicyEndpoint()
        config, split = self.config, self.split
        if config.runtime == "subprocess":
            self.warn("runtime", f"runtime = {config.runtime!r} has no effect: it applies to agents of v1 environments")
        with _keep_signal_handlers():
            problem = f"environment {config.id!r} with env.args = {config.args} does not load"
            with config_errors(problem), _name_local_sandbox(problem):
                self._env = vf.load_environment(self.module, **config.args)
            self._check_environment()
            self._added_rewards = self._load_rewards()
            with config_errors(f"the {split} examples of environment {config.id!r} do not load"):
                self._rows = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        if len(self._rows) == 0:
            raise ConfigError(f"environment {config.id!r} has no {split} examples; check env.args")
        has_own = (
            type(self._env).get_eval_dataset is not vf.Environment.get_eval_dataset
            or self._env.eval_dataset is not None
            or self._env.eval_dataset_source is not None
        )
        self.eval_split = "own" if has_own else "train"

    def __len__(self) -> int:
        return len(self._rows)

    def prompt_tokens(self, example: int) -> int:
        """Return the length of the first prompt of an example, in tokens."""
        env, row = self._route(self._rows[example])
        return self._count_tokens(
            _messages(row["prompt"], "user"), [tool_definition(tool) for tool in env.tool_defs or ()]
        )

    def _row(self, example: int) -> Row:
        return self._route(self._rows[example])[1]

    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        env, row = self._route(self._rows[example])
        clients: list[RolloutClient] = []

        async def attempt(this: Attempt) -> RolloutClient:
            client = RolloutClient(self.warn, self._recorder(this, seq_len), this, sampling, self._endpoint)
            clients.append(client)
            try:
                await self._attempt(client, env, row, sampling)
            except BaseException:
                client.end_calls()  # another attempt may follow, and nothing takes the replies to this one
                raise
            return client

        try:
            with contain_failures():  # foreign code makes the states and their messages
                finished = await self._score(group, env, await group.run(attempt))
                return [self._rollout(client, seq_len) for client in finished]
        finally:
            await self._clean_up(env.rubric, [client.state for client in clients if client.state is not None])
            for client in clients:
                client.release()

    async def _attempt(self, client: RolloutClient, env: Any, row: Row, sampling: Mapping[str, Any]) -> None:
        """Run one rollout and set its state. At the time limit it is scored with its turns so far."""
        try:
            async with client.attempt.clock:
                with contain_failures():
                    client.state = await env.rollout(dict(row), client, "policy", dict(sampling))
        except RolloutTimedOut:
            state = client.state
            if state is None or not state.get("trajectory") or state.get("completion") is None:
                raise
            # As verifiers does at its own limit.
            state["timed_out"] = state["is_completed"] = True
            state["stop_condition"] = "timeout_reached"
        except EnvironmentFailed as failure:
            client.raise_failure()
            is_raw_prompt = client.is_raw and client.recorder.prompt_too_long
            if is_raw_prompt or isinstance(failure.__cause__, vf.OverlongPromptError):  # raised by its own rollout()
                raise SampleTooLong(str(failure.__cause__)) from failure
            raise
        client.raise_failure()
        if error := client.state.get("error"):
            raise environment_failure(error) if isinstance(error, BaseException) else EnvironmentFailed(repr(error))
        with contain_failures():
            client.credit = GivenCredit.read(client.state, client.reply)
        if client.credit.has_advantages and self.trains:
            self.warn("advantages", "it sets advantages itself, which are trained on instead of computed ones")
        if client.credit.has_rewards and self.config.step_rewards == "ignore":
            self.warn(
                "rewards of steps",
                "it sets `reward` of single steps, which count only if its rubric adds them up; set step_rewards of "
                'the environment to "included" if it does, and to "add" if not',
            )

    async def _score(self, group: GroupAttempts, env: Any, finished: list[RolloutClient]) -> list[RolloutClient]:
        """Score the rollouts of a group together; return those with a reward."""
        states = [client.state for client in finished]

        async def score() -> dict[int, EnvironmentFailed]:
            for client in finished:
                client.credit.restore(client.state)
            rubric = rubrics.with_rewards(env.rubric if env.score_rollouts else None, self._added_rewards)
            if rubric is None:
                with contain_failures():
                    await env.rubric.dummy_score_group(states)
                return {}
            try:
                failures = await rubrics.score_group(rubric, states, self.config.reward_errors == "zero", self.warn)
            except EnvironmentFailed:
                _raise_failures(finished)
                raise
            _raise_failures(finished)
            for failure in failures.values():
                if failure.is_infrastructure:
                    raise failure
            return failures

        failures = await group.repeat(score)
        for index in failures:
            group.account.discard("failed", 1, finished[index].attempt.sampled)
        group.check([*failures.values()], len(finished))
        return [client for index, client in enumerate(finished) if index not in failures]

    async def _clean_up(self, rubric: Any, states: Sequence[Any]) -> None:
        """Let the rubric release the resources of the rollouts, such as sandboxes."""

        async def clean_up(state: Any) -> None:
            with contain_failures():
                await rubric.cleanup(state)

        if not rubrics.has_cleanup(rubric):
            return
        for result in await asyncio.gather(*map(clean_up, states), return_exceptions=True):
            if isinstance(result, Exception):
                self.warn("cleanup", f"the cleanup of its rubric failed: {result}")

    def _route(self, row: Row) -> tuple[Any, Row]:
        """Return the environment that a row belongs to, inside nested groups.

        The rubric of a nested `EnvGroup` looks for the outer name at each level and so scores 0.
        """
        env = self._env
        while isinstance(env, vf.EnvGroup):
            name, row, _ = env._route_child_input(row)
            env = env.get_env_for_name(name)
        return env, row

    def _rollout(self, client: RolloutClient, seq_len: int) -> Rollout:
        state = client.state
        trained = _trained_replies(state, client)
        if not trained and client.recorder.prompt_too_long:
            raise SampleTooLong(f"a prompt of environment {self.config.label} does not fit into seq_len = {seq_len}")
        if not trained:
            raise EnvironmentFailed(_no_turns_message(state, client))
        messages = [*_messages(state["prompt"], "user"), *_messages(state.get("completion"), "assistant")]
        reward, mode = as_number("the reward", state["reward"]), self.config.step_rewards
        if mode == "add":
            reward += client.credit.total
        if self.trains:
            check_scored(client.credit, state)
        return client.recorder.rollout(
            trained,
            normalise(messages),
            reward=reward,
            metrics={name: as_number(f"metric {name}", value) for name, value in (state["metrics"] or {}).items()},
            is_truncated=bool(state.get("is_truncated") or state.get("timed_out")),
            credits=client.credit.credits(trained, reward, mode),
        )

    def _load_rewards(self) -> list[tuple[Callable[..., Any], float]]:
        """Import the functions of `env.rewards`, whose names must differ from those of each rubric."""
        rewards = load_rewards(self.config.rewards, self.config.id)
        for leaf in _leaf_environments(self._env) if rewards else ():
            own = set(leaf.rubric._get_reward_func_names())
            check_names([*own, *(reward.label for reward in self.config.rewards)], self.config.id)
        return rewards

    def _check_environment(self) -> None:
        """Reject an environment with features that would otherwise be ignored.

        Raises:
            ConfigError: it computes advantages, or changes how verifiers runs a group.
        """
        for leaf in _leaf_environments(self._env):
            if self.trains and leaf.rubric.has_advantages:
                raise ConfigError(
                    f"environment {self.config.id!r} computes advantages (has_advantages of its rubric), which would "
                    "be ignored; return rewards from its rubric, and set `orchestrator.advantage`"
                )
            for hook in _UNUSED_HOOKS:
                if getattr(type(leaf), hook) is not getattr(vf.Environment, hook):
                    raise ConfigError(
                        f"environment {self.config.id!r} overrides {hook}(), which is not called here; override "
                        "rollout(), or score in its rubric"
                    )
            own = {name: value for name, value in leaf.sampling_args.items() if value and (name, value) != ("n", 1)}
            if own:
                self.warn(
                    "sampling_args",
                    f"its sampling_args are ignored ({', '.join(sorted(own))}); set them in `sampling` of the "
                    "environment's configuration",
                )


def _raise_failures(clients: Iterable[RolloutClient]) -> None:
    """Raise the lost server or other failure of the clients, if there is one.

    Reward functions may call the policy, and a rubric may count the resulting exception as 0.
    """
    for client in clients:
        client.raise_failure()


@contextmanager
def _name_local_sandbox(problem: str) -> Iterator[None]:
    """Raise ConfigError with the replacement for verifiers' sandbox environments, which cannot be constructed."""
    try:
        yield
    except Exception as error:  # verifiers wraps what a constructor raises
        cause = error.__cause__ or error
        if not isinstance(cause, ValidationError) or cause.title != "CreateSandboxRequest":
            raise
        raise ConfigError(
            f"{problem}: no published prime-sandboxes can run verifiers' SandboxEnv and PythonEnv; derive the "
            "environment from prime_rl.sandbox.python_env.PythonEnv, which runs code on this machine (docs/sandbox.md)"
        ) from None


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Undo the SIGINT and SIGTERM handlers that the constructor of each environment installs."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _trained_replies(state: Any, client: RolloutClient) -> dict[Reply, Mask]:
    """Return the replies in the trajectory, and which of their tokens to train on; of the raw client, those that are
    messages of the completion.

    Other calls, for example to simulate a user or to judge, are no part of the rollout.

    Raises:
        EnvironmentFailed: the tokens of a step differ from the sampled ones, or a message can be several replies.
    """
    trained: dict[Reply, Mask] = {}
    if client.raw_replies:
        with contain_failures():
            found = replies_in(_messages(state.get("completion"), "assistant"), client.raw_replies)
        trained = dict.fromkeys(found, True)
    for step in state.get("trajectory") or ():
        if (reply := client.reply(step.get("response"))) is not None:
            mask = _trained_mask(step.get("tokens"), reply)
            if mask is True or np.any(mask):
                trained[reply] = mask
    return {reply: trained[reply] for reply in client.recorder.replies if reply in trained}


def _no_turns_message(state: Any, client: RolloutClient) -> str:
    """Return why a rollout has nothing to train on."""
    if client.recorder.replies:
        count = len(client.recorder.replies)
        return (
            f"the model answered {count} calls, but no answer is the `response` of a step in state['trajectory'], or "
            "all their tokens are masked; only turns in the trajectory are trained on"
        )
    if state.get("trajectory") or state.get("completion"):
        return (
            "its rollout() never called its client, so there are no tokens to train on; call "
            "`await self.get_model_response(state, messages)`"
        )
    return f"a rollout ended before a completion: {state.get('stop_condition')}"


def _messages(value: Any, role: str) -> Sequence[Any]:
    """Return a prompt or completion as messages; plain text becomes a message of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value or ()


def _leaf_environments(env: Any) -> Iterator[Any]:
    if isinstance(env, vf.EnvGroup):
        for inner in env.envs:
            yield from _leaf_environments(inner)
    else:
        yield env


def _trained_mask(tokens: Any, reply: Reply) -> Mask:
    """Return which tokens of a step to train on: all, unless the environment has shortened or masked them."""
    turn = reply.turn
    if turn is None or tokens is None or is_whole(tokens, turn):
        return True
    ids, mask = tokens["completion_ids"], list(tokens["completion_mask"])
    if list(ids) != turn.generation.token_ids[: len(ids)].tolist() or len(mask) > len(turn.generation.token_ids):
        raise EnvironmentFailed("it changes `completion_ids` of a step; only sampled tokens can be trained on")
    trained = np.zeros(len(turn.generation.token_ids), np.bool_)
    trained[: len(mask)] = mask
    return trained
