"""Environments of the classic verifiers API.

Verifiers runs the turns and the rubric. It calls the model through `RolloutClient`. Failures that verifiers counts as a
reward of 0 raise here.
"""

import asyncio
import functools
import inspect
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import verifiers as vf
from pydantic import ValidationError

from prime_rl.core.errors import ConfigError
from prime_rl.core.types import Rollout
from prime_rl.rollouts.clients.raw_openai_client import PolicyEndpoint, replies_in
from prime_rl.rollouts.environment_backend import EnvironmentBackend, check_names, load_rewards, refuse_agent
from prime_rl.rollouts.group_attempts import (
    Attempt,
    EnvironmentFailed,
    GroupAttempts,
    RolloutTimedOut,
    SampleTooLong,
    as_number,
    check_arguments,
    config_errors,
    contain_failures,
    environment_failure,
)
from prime_rl.rollouts.recorder import Mask
from prime_rl.rollouts.rendering.messages import Reply, normalise
from prime_rl.rollouts.separate.values import arguments_of
from prime_rl.rollouts.verifiers import rubrics
from prime_rl.rollouts.verifiers.classic_client import (
    GivenCredit,
    RolloutClient,
    check_scored,
    is_whole,
    tool_definition,
)

Row = Mapping[str, Any]
_Client = TypeVar("_Client", bound=RolloutClient)

_DEFAULT_SAMPLING: tuple[tuple[str, Any], ...] = (("n", 1), ("extra_body", {}))
"""What the constructor of an environment adds to its `sampling_args`."""

_UNUSED_HOOKS = ("run_rollout", "run_group", "_run_rollout_state", "_run_group_states")


@dataclass(frozen=True, slots=True)
class Routed:
    """The environment of a row, inside nested groups.

    Attributes:
        env: runs the rollouts.
        row: as `env` gets it.
        groups: around `env`, from the outermost to the innermost.
        route: the names of the environments in `groups`.
    """

    env: Any
    row: Row
    groups: tuple[Any, ...]
    route: tuple[str, ...]

    def rubric(self, only_scored: bool = True) -> Any:
        """Return the rubric of the environment and of its groups; None if, with `only_scored`, nothing is scored."""
        rubric = self.env.rubric if self.env.score_rollouts or not only_scored else None
        for group in reversed(self.groups):
            if group.score_rollouts or not only_scored:
                rubric = rubrics.group_rubric(group.rubric, rubric)
        return rubric

    def sampling(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of the run with those of the constructors."""
        given = dict(sampling)
        for env in (*self.groups, self.env):
            given |= {
                name: value for name, value in env.sampling_args.items() if (name, value) not in _DEFAULT_SAMPLING
            }
        return given


class ClassicEnvironment(EnvironmentBackend):
    """One classic environment."""

    def _load(self) -> None:
        rubrics.patch_verifiers()
        self._endpoint = PolicyEndpoint()
        config, split = self.config, self.split
        if config.runtime == "subprocess":
            self.warn("runtime", f"runtime = {config.runtime!r} has no effect: it applies to agents of v1 environments")
        refuse_agent(config)
        with _keep_signal_handlers():
            problem = f"environment {config.id!r} with env.args = {config.args} does not load"
            with config_errors(problem), _name_local_sandbox(problem):
                self._env = self._make_environment(problem)
            self._check_environment()
            self._added_rewards = self._load_rewards()
            with config_errors(f"the {split} examples of environment {config.id!r} do not load"):
                self._rows = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        if len(self._rows) == 0:
            raise ConfigError(f"environment {config.id!r} has no {split} examples; check env.args")
        self._check_answers()
        has_own = (
            type(self._env).get_eval_dataset is not vf.Environment.get_eval_dataset
            or self._env.eval_dataset is not None
            or self._env.eval_dataset_source is not None
        )
        self.eval_split = "own" if has_own else "train"

    def _make_environment(self, problem: str) -> Any:
        """Call `load_environment` as verifiers does, which would hide the type of an error."""
        load_environment, config = sys.modules[self.module].load_environment, self.config
        check_arguments(load_environment, config.args, config.id)
        try:
            env = load_environment(**config.args)
        except ConfigError as error:  # of the environment, whose name it may lack
            raise ConfigError(f"{problem}: {error}") from error
        if not isinstance(env, vf.Environment):
            raise ConfigError(
                f"load_environment() of environment {config.id!r} returned {type(env).__name__}, not an environment of "
                "verifiers; let it return one, such as vf.SingleTurnEnv(dataset=..., rubric=...)"
            )
        env.env_id, env.env_args = env.env_id or self.module, env.env_args or config.args
        return env

    def __len__(self) -> int:
        return len(self._rows)

    def prompt_tokens(self, example: int) -> int:
        """Return the length of the first prompt of an example, in tokens."""
        routed = self._route(self._rows[example])
        tools = [tool_definition(tool) for tool in routed.env.tool_defs or ()]
        return self._count_tokens(_messages(routed.row["prompt"], "user"), tools)

    def describe(self) -> dict[str, Any]:
        """Return what `EnvironmentBackend.describe` says; the rewards are those of the first example."""
        rubric = rubrics.with_rewards(self._route(self._rows[0]).rubric(), self._added_rewards)
        arguments = arguments_of(sys.modules[self.module].load_environment)
        return {"api": "classic", "arguments": arguments, "rewards": rubrics.reward_weights(rubric)}

    def _row(self, example: int) -> Row:
        return self._route(self._rows[example]).row

    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]:
        routed = self._route(self._rows[example])
        clients: list[RolloutClient] = []

        async def attempt(this: Attempt) -> RolloutClient:
            client = RolloutClient(self.warn, self._recorder(this, seq_len), this, sampling, self._endpoint)
            clients.append(client)
            try:
                await self._attempt(client, routed, sampling)
            except BaseException:
                client.end_calls()  # another attempt may follow, and nothing takes the replies to this one
                raise
            return client

        try:
            with contain_failures():  # foreign code makes the states and their messages
                finished = await self._score(group, routed, await group.run(attempt))
                weights = rubrics.reward_weights(rubrics.with_rewards(routed.rubric(), self._added_rewards))
                return [self._rollout(client, seq_len, weights) for client in finished]
        finally:
            await self._clean_up(
                routed.rubric(only_scored=False), [client.state for client in clients if client.state is not None]
            )
            for client in clients:
                client.release()

    async def _attempt(self, client: RolloutClient, routed: Routed, sampling: Mapping[str, Any]) -> None:
        """Run one rollout and set its state. At the time limit it is scored with its turns so far."""
        try:
            async with client.attempt.clock:
                with contain_failures():
                    client.state = await routed.env.rollout(
                        dict(routed.row), client, "policy", routed.sampling(sampling)
                    )
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
        client.end_rollout()
        client.raise_failure()
        if error := client.state.get("error"):
            raise environment_failure(error) if isinstance(error, BaseException) else EnvironmentFailed(repr(error))
        with contain_failures():
            client.credit = GivenCredit.read(client.state, client.reply)
        warn_about_credit(self, client.credit)

    async def _score(self, group: GroupAttempts, routed: Routed, finished: list[RolloutClient]) -> list[RolloutClient]:
        """Score the rollouts of a group together; return those with a reward."""
        rubric = rubrics.with_rewards(routed.rubric(), self._added_rewards)
        if rubric is not None and any(type(outer.rubric) is not rubrics.EnvGroupRubric for outer in routed.groups):
            for client in finished:  # the rubric of a group finds the environment there
                route = routed.route[0] if len(routed.route) == 1 else list(routed.route)
                client.state["info"] = {**(client.state.get("info") or {}), rubrics.ENV_GROUP_INFO_KEY: route}
        return await score_rollouts(group, finished, functools.partial(self._score_once, rubric, routed.env))

    async def _score_once(
        self, rubric: Any, env: Any, finished: list[RolloutClient]
    ) -> tuple[dict[int, EnvironmentFailed], bool]:
        """Score the rollouts, as `score_rollouts` asks for it."""
        states = [client.state for client in finished]
        for client in finished:
            client.credit.restore(client.state)
        if rubric is None:
            with contain_failures():
                await env.rubric.dummy_score_group(states)
            return {}, False
        try:
            failures = await rubrics.score_group(rubric, states, self.config.reward_errors == "zero", self.warn)
        except EnvironmentFailed:
            _raise_failures(finished)
            raise
        _raise_failures(finished)
        for failure in failures.values():
            if failure.is_infrastructure:
                raise failure
        return failures, bool(failures) and rubrics.scores_jointly(rubric)

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

    def _route(self, row: Row) -> Routed:
        """Return the environment that a row belongs to.

        The rubric of a nested `EnvGroup` looks for the outer name at each level and so scores 0.
        """
        env, groups, route = self._env, [], ()
        while isinstance(env, vf.EnvGroup):
            groups.append(env)
            name, row, path = env._route_child_input(row)
            route = route or path
            env = env.get_env_for_name(name)
        return Routed(env, row, tuple(groups), route)

    def _rollout(self, client: RolloutClient, seq_len: int, weights: dict[str, float]) -> Rollout:
        state = client.state
        messages = [*_messages(state["prompt"], "user"), *_messages(state.get("completion"), "assistant")]
        is_truncated = bool(state.get("is_truncated") or state.get("timed_out"))
        rollout = make_rollout(self, client, seq_len, messages, state, is_truncated, weights)
        if self.trains:
            check_scored(client.credit, state)
        return rollout

    def _load_rewards(self) -> list[tuple[Callable[..., Any], float]]:
        """Import the functions of `env.rewards`, whose names must differ from those of each rubric."""
        rewards = load_rewards(self.config.rewards, self.config.id)
        for env in _environments(self._env) if rewards else ():
            own = set(env.rubric._get_reward_func_names())
            check_names([*own, *(reward.label for reward in self.config.rewards)], self.config.id)
        return rewards

    def _check_environment(self) -> None:
        """Reject an environment with features that would otherwise be ignored.

        Raises:
            ConfigError: it computes advantages, changes how verifiers runs a group, or the rubric of an `EnvGroup`.
        """
        for env in _environments(self._env):
            if self.trains and env.rubric.has_advantages:
                raise ConfigError(
                    f"environment {self.config.id!r} computes advantages (has_advantages of its rubric), which would "
                    "be ignored; return rewards from its rubric, and set `orchestrator.advantage`"
                )
            is_group = isinstance(env, vf.EnvGroup)
            kind = vf.EnvGroup if is_group else vf.Environment
            for hook in (*_UNUSED_HOOKS, *(["rollout"] if is_group else [])):
                if hook in vars(env) or getattr(type(env), hook) is not getattr(kind, hook):
                    where = " of the environments in the EnvGroup" if is_group else ""
                    raise ConfigError(
                        f"environment {self.config.id!r} overrides {hook}() of {kind.__name__}, which is not called "
                        f"here; override rollout(){where}, or score in its rubric"
                    )
            if is_group and not rubrics.counts_environments(env.rubric):
                raise ConfigError(
                    f"environment {self.config.id!r} replaces the rubric of an EnvGroup, so those of its environments "
                    "would not count; call add_rubric(...) of the EnvGroup instead"
                )

    def _check_answers(self) -> None:
        """Raise ConfigError if a reward function compares with an answer that no example has: verifiers passes "".

        An environment of its own class may set the answer during the rollout.
        """
        columns = getattr(self._rows, "column_names", None) or list({key: None for row in self._rows for key in row})
        if "answer" in columns or not type(self._env).__module__.startswith("verifiers."):
            return
        for func in self._env.rubric._get_reward_funcs():
            wanted = inspect.signature(func).parameters.get("answer")
            if wanted is not None and wanted.default is wanted.empty:
                raise ConfigError(
                    f"environment {self.config.id!r}: its {self.split} examples have no column 'answer' (but "
                    f"{', '.join(map(repr, columns))}), which the reward function {func.__name__} "
                    "takes; name the column 'answer'"
                )


async def score_rollouts(
    group: GroupAttempts,
    finished: list[_Client],
    score_once: Callable[[list[_Client]], Awaitable[tuple[dict[int, EnvironmentFailed], bool]]],
) -> list[_Client]:
    """Score the rollouts of a group together; return those with a reward.

    `score_once` returns the failures of single rollouts, by index, and whether rewards depend on the whole group: then
    the others are scored again without a rollout that failed.
    """
    while True:
        failures, jointly = await group.repeat(functools.partial(score_once, finished))
        for index in failures:
            group.account.discard("failed", 1, finished[index].attempt.sampled)
        group.check([*failures.values()], len(finished))
        finished = [client for index, client in enumerate(finished) if index not in failures]
        if not failures or not jointly:
            return finished


def make_rollout(
    backend: EnvironmentBackend,
    client: RolloutClient,
    seq_len: int,
    messages: Sequence[Any],
    score: Mapping[str, Any],
    is_truncated: bool,
    weights: dict[str, float],
) -> Rollout:
    """Return a finished rollout; `score` has its reward and metrics. Raises SampleTooLong, EnvironmentFailed."""
    trained = trained_replies(client.state, client)
    if not trained and client.recorder.prompt_too_long:
        raise SampleTooLong(f"a prompt of environment {backend.config.label} does not fit into seq_len = {seq_len}")
    if not trained:
        raise EnvironmentFailed(no_turns_message(client.state, client))
    reward, mode = as_number("the reward", score["reward"]), backend.config.step_rewards
    if mode == "add":
        reward += client.credit.total
    return client.recorder.rollout(
        trained,
        normalise(messages),
        reward=reward,
        metrics={name: as_number(f"metric {name}", value) for name, value in (score["metrics"] or {}).items()},
        is_truncated=is_truncated,
        weights=weights,
        credits=client.credit.credits(trained, reward, mode),
    )


def warn_about_credit(backend: EnvironmentBackend, credit: GivenCredit) -> None:
    """Warn about rewards and advantages that an environment has set itself."""
    if credit.has_advantages and backend.trains:
        backend.warn("advantages", "it sets advantages itself, which are trained on instead of computed ones")
    if credit.has_rewards and backend.config.step_rewards == "ignore":
        backend.warn(
            "rewards of steps",
            "it sets `reward` of single steps, which count only if its rubric adds them up; set step_rewards of "
            'the environment to "included" if it does, and to "add" if not',
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
            "environment from prime_rl_sandbox.python_env.PythonEnv, which runs code on this machine (docs/sandbox.md)"
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


def trained_replies(state: Any, client: RolloutClient) -> dict[Reply, Mask]:
    """Return the replies to train on, and which of their tokens: those in the trajectory; if there are none, those of
    the raw client that are messages of the completion.

    Other calls, for example to simulate a user or to judge, are no part of the rollout.

    Raises:
        EnvironmentFailed: the tokens of a step differ from the sampled ones, or a message can be several replies.
    """
    steps = [(client.reply(step.get("response")), step) for step in state.get("trajectory") or ()]
    masks = {reply: _trained_mask(step.get("tokens"), reply) for reply, step in steps if reply is not None}
    if not masks and any(call.is_raw for call in client.calls):
        prompt, completion = _messages(state["prompt"], "user"), _messages(state.get("completion"), "assistant")
        with contain_failures():
            masks = dict.fromkeys(replies_in(prompt, completion, client.calls), True)
    trained = {reply: mask for reply, mask in masks.items() if mask is True or np.any(mask)}
    return {reply: trained[reply] for reply in client.recorder.replies if reply in trained}


def no_turns_message(state: Any, client: RolloutClient) -> str:
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


def _environments(env: Any) -> Iterator[Any]:
    """Yield an environment and, if it is a group, all in it."""
    yield env
    for inner in env.envs if isinstance(env, vf.EnvGroup) else ():
        yield from _environments(inner)


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
