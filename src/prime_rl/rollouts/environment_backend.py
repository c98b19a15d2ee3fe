"""What the environments of both verifiers APIs have in common, with the rewards that the configuration adds to them.

Reward functions, also those of an environment, are called with the objects that their parameters name
(`call_parameters`). A function of `env.rewards` can name `text` (the last reply), `completion`, `prompt`, `answer`,
`info`, `state`, and what only one API has: the columns of the example (classic), `task` and `trace` (v1).
"""

import dis
import functools
import inspect
import json
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import BaseModel
from xxhash import xxh3_128

from prime_rl.configs.environment import EnvConfig, RewardConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import find_function_files, hash_files, load_function
from prime_rl.core.types import EvalSplit, Rollout, Split
from prime_rl.rollouts.clients.openai_chat_client import ChatServer
from prime_rl.rollouts.group_attempts import (
    ZERO_HINT,
    Attempt,
    EnvironmentFailed,
    GroupAccount,
    GroupAttempts,
    as_number,
    contain_failures,
    reward_failure,
)
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.messages import Sampler, last_reply, normalise
from prime_rl.rollouts.rendering.renderer import Renderer

LAST_CLASSIC = "0.3.2.dev22"
"""The last verifiers release with the classic API; pyproject.toml pins it."""

_MAX_ANSWER_CHARACTERS = 2_000
_MAX_HASHED_ROWS = 10_000
_MAX_HASHED_BYTES = 64 << 20
"""Limits of `EnvironmentBackend.content_hash`: a second, or less, at each load."""


class EnvironmentBackend(ABC):
    """One split of an environment inside a worker.

    Attributes:
        config: the environment.
        module: name of its imported module.
        split: which examples.
        trains: the rollouts are trained on.
        eval_split: source of its evaluation examples.
    """

    eval_split: EvalSplit = "none"
    _added_rewards: Sequence[tuple[Callable[..., Any], float]] = ()

    def __init__(
        self,
        config: EnvConfig,
        module: str,
        renderer: Renderer | None,
        split: Split,
        keep_messages: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Load the environment; see `worker_main.load`."""
        self.config = config
        self.module = module
        self.split = split
        self.trains = split == "train" and not keep_messages
        self._renderer = renderer
        self._keep_messages = keep_messages
        self._send_warning = warn
        self._warned_topics = set[str]()
        self._load()

    @abstractmethod
    def _load(self) -> None:
        """Load the environment; ConfigError if it rejects its arguments or has no examples."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples of the split."""

    @abstractmethod
    def prompt_tokens(self, example: int) -> int:
        """Return the length of the first prompt of an example, in tokens; 0 if the server renders it."""

    @abstractmethod
    def _row(self, example: int) -> Any:
        """Return the columns of an example: a mapping, or an object with attributes."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return `api`, `arguments` with the text of their defaults, and `rewards`: functions with their weights.

        Called before the first group.
        """

    def columns(self, example: int) -> dict[str, str]:
        """Return the values of the columns `env.breakdown` of an example; ConfigError if it lacks one."""
        values: dict[str, str] = {}
        for path in self.config.breakdown:
            value = self._row(example)
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
            if value is None:
                raise ConfigError(
                    f"env.breakdown: example {example} of environment {self.config.id!r} has no column {path!r}"
                )
            values[path] = str(value)
        return values

    def content_hash(self) -> str:
        """Return a hash of the examples, and of the files of added reward functions and of an agent function.

        Of more than 10,000 examples, or 64 MiB, a random choice is hashed, always the same. A value that is neither
        plain data nor an array or image counts by its type.
        """
        digest, size = xxh3_128(f"{len(self)} ".encode()), 0
        for example in np.random.default_rng(0).permutation(len(self))[:_MAX_HASHED_ROWS].tolist():
            row = json.dumps(self._row(example), default=_plain, skipkeys=True) + "\n"
            digest.update(row.encode())
            if (size := size + len(row)) > _MAX_HASHED_BYTES:
                break
        for function, _ in self._added_rewards:
            file = getattr(inspect.getmodule(getattr(function, "func", function)), "__file__", None)
            digest.update(Path(file).read_bytes() if file else b"")
        if self.config.agent is not None and (files := find_function_files(self.config.agent)) is not None:
            digest.update(hash_files(files).encode())
        return digest.hexdigest()[:12]

    def answer(self, example: int) -> str | None:
        """Return the column `answer` of an example, shortened, for display; None if it has none."""
        row = self._row(example)
        value = row.get("answer") if isinstance(row, Mapping) else getattr(row, "answer", None)
        text = "" if value is None or callable(value) else str(value)
        if len(text) > _MAX_ANSWER_CHARACTERS:
            return f"{text[:_MAX_ANSWER_CHARACTERS]}… ({len(text):,} characters)"
        return text or None

    async def run_group(
        self,
        example: int,
        count: int,
        server: Sampler | ChatServer,
        sampling: Mapping[str, Any],
        seq_len: int,
        seed: Sequence[int] | None = None,
        account: GroupAccount | None = None,
    ) -> list[Rollout]:
        """Run and score `count` rollouts of one example; see `EnvironmentPool.run_group`. `account` counts the tokens.

        Returns:
            The rollouts: `count`, or at least `env.min_rollouts` of them if others failed.

        Raises:
            EnvironmentFailed: the environment raised, or a reward or metric is not a finite number.
            SampleTooLong: a prompt leaves no space for a completion.
            UnsupportedEnvironment: the environment uses an unsupported feature.
            InferenceServerLost, InferenceError: the server failed.
        """
        account, is_train = account or GroupAccount(), self.split == "train"
        group = GroupAttempts(self.config, example, count, server, seed, account, is_train)
        rollouts = await self._run(group, example, sampling, seq_len)
        answer = self.answer(example)
        return [replace(rollout, answer=answer) for rollout in rollouts]

    @abstractmethod
    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]: ...

    def warn(self, topic: str, message: str) -> None:
        """Warn about the environment, once per topic."""
        if topic not in self._warned_topics and self._send_warning is not None:
            self._warned_topics.add(topic)
            self._send_warning(message)

    def _count_tokens(self, messages: Sequence[Any], tools: list[dict[str, Any]] | None = None) -> int:
        return len(self._renderer.render(messages, tools or None)) if self._renderer is not None else 0

    def _recorder(self, attempt: Attempt, seq_len: int, *seed: int) -> Recorder:
        """Return the recorder of one attempt; `seed` extends the attempt's."""
        seeds = None if attempt.seed is None else [*attempt.seed, *seed]
        return Recorder(attempt.server, self._renderer, seq_len, seeds, self._keep_messages)


def _plain(value: Any) -> Any:
    """Return a value of an example as JSON can represent it, the same in every process."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, date | Decimal | PurePath | UUID):
        return str(value)
    if callable(content := getattr(value, "tobytes", None)):  # arrays and images
        value = content()
    return xxh3_128(value).hexdigest() if isinstance(value, bytes) else type(value).__qualname__


def refuse_agent(config: EnvConfig) -> None:
    """Raise ConfigError if a classic environment is to run an agent of the user."""
    if config.has_agent:
        raise ConfigError(
            f"environment {config.id!r} has the classic API, which calls the model itself; env.command, harness "
            "and agent need a v1 taskset (docs/agents.md)"
        )


def refuse_step_rewards(config: EnvConfig) -> None:
    """Raise ConfigError if a v1 taskset is to count rewards of steps."""
    if config.step_rewards != "ignore":
        raise ConfigError(
            f"step_rewards = {config.step_rewards!r} of environment {config.id!r} needs a classic environment: a v1 "
            "taskset rewards whole rollouts; remove it"
        )


def load_rewards(configs: Sequence[RewardConfig], env_id: str) -> list[tuple[Callable[..., Any], float]]:
    """Import the functions, with their weights. Each is named after its metric.

    Raises:
        ConfigError: a function cannot be imported, or two have the same name.
    """
    rewards: list[tuple[Callable[..., Any], float]] = []
    for index, config in enumerate(configs):
        function = load_function(config.import_path, f"env.rewards.{index}.import_path of environment {env_id!r}")
        named: Any = functools.partial(function, **config.kwargs)
        named.__name__ = config.label
        rewards.append((named, config.weight))
    check_names([config.label for config in configs], env_id)
    return rewards


def check_names(names: Sequence[str], env_id: str) -> None:
    """Raise ConfigError if two reward functions of an environment have the same name: their metric would be a sum."""
    if duplicates := [name for index, name in enumerate(names) if name in names[:index]]:
        raise ConfigError(
            f"environment {env_id!r} has two reward functions called {duplicates[0]!r}; set env.rewards.name of one"
        )


def split_scores(
    function: Callable[..., Any], value: Any, weight: float, warn: Callable[[str, str], None]
) -> tuple[float | None, dict[str, float]]:
    """Return the reward in the value of a reward function, and its metrics `<function>/<key>`.

    The value is a number, or a dictionary of numbers: its `reward`, or else `score`, is the reward, the others are
    metrics. Without either the reward is None, if the function has weight 0. A metric that is not a finite number is
    missing, with a warning.

    Raises:
        EnvironmentFailed: the reward is not a finite number, or the function has a weight and returns no reward.
    """
    label = function.__name__
    name = f"reward function {label}"
    if not isinstance(value, Mapping):
        return as_number(name, value), {}
    key = next((key for key in ("reward", "score") if key in value), None)
    if key is None and weight != 0:
        raise EnvironmentFailed(
            f"{name} returned a dictionary without 'reward' or 'score' (its keys are {[*value]!r:.80}); return one of "
            "them, or set weight 0 to record metrics only"
        )
    reward = None if key is None else as_number(f"{key!r} of {name}", value[key])
    metrics = dict[str, float]()
    for other in [other for other in value if other != key]:
        try:
            metrics[f"{label}/{other}"] = as_number(f"{other!r} of {name}", value[other])
        except EnvironmentFailed as failure:
            warn(f"metric {label}/{other}", f"{failure}; only this metric is missing")
    return reward, metrics


def objects_of(messages: Sequence[Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reward function can take of a conversation, and of the columns of its example."""
    messages = normalise(messages)
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    own = {"text": last_reply(messages), "prompt": messages[:first], "completion": messages[first:]}
    return {"answer": "", "info": {}, **row, **own}


async def score_objects(
    rewards: Sequence[tuple[Callable[..., Any], float]],
    objects: Mapping[str, Any],
    zero: bool,
    warn: Callable[[str, str], None],
) -> tuple[float, dict[str, float], int]:
    """Return the sum of the weighted rewards of a rollout, the value of each function, and how many counted as 0.

    With `zero`, a function that raises, or returns no finite number, counts as 0. `warn` gets a topic and a warning for
    each failed function that has weight 0 or counts as 0.

    Raises:
        EnvironmentFailed: a function failed.
    """
    total, values, num_zeros = 0.0, dict[str, float](), 0
    for function, weight in rewards:
        name = function.__name__
        try:
            values |= await _call(function, objects, weight, warn)
        except EnvironmentFailed as failure:
            if weight != 0 and failure.is_infrastructure:
                raise
            if weight != 0 and not zero:
                raise EnvironmentFailed(f"{failure} {ZERO_HINT}") from failure
            if weight:
                values[name] = 0.0
                num_zeros += 1
            consequence = "it counts as 0 (env.reward_errors)" if weight else "only its metric is missing"
            warn(f"reward {name}", f"{failure}; {consequence}")
        total += weight * values.get(name, 0.0)
    return total, values, num_zeros


async def _call(
    function: Callable[..., Any], objects: Mapping[str, Any], weight: float, warn: Callable[[str, str], None]
) -> dict[str, float]:
    name = function.__name__
    try:
        with contain_failures():
            value = function(**call_parameters(function).select(objects))
            value = await value if inspect.isawaitable(value) else value
            reward, metrics = split_scores(function, value, weight, warn)
            return metrics if reward is None else {name: reward, **metrics}
    except EnvironmentFailed as error:
        raise reward_failure(f"reward function {name}", error) from error


@dataclass(frozen=True, slots=True)
class CallParameters:
    """How a function is called with objects by name.

    Attributes:
        signature: of the function.
        names: of its parameters.
        takes_all: it has `**kwargs`.
        never_waits: it is a coroutine function without an `await`.
    """

    signature: inspect.Signature
    names: frozenset[str]
    takes_all: bool
    never_waits: bool

    def select(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the objects that the function takes."""
        if self.takes_all:
            return objects
        return {name: objects[name] for name in self.names if name in objects}


# Weak: an environment may define functions for each rollout. The methods of an object are made at each access, so they
# are stored by their function, apart from plain functions because their signature has one parameter less.
_of_functions: WeakKeyDictionary[Any, CallParameters] = WeakKeyDictionary()
_of_methods: WeakKeyDictionary[Any, CallParameters] = WeakKeyDictionary()


def call_parameters(func: Callable[..., Any]) -> CallParameters:
    """Return the parameters of `func`, from a cache for functions, methods and partial functions."""
    cache, key = _of_functions, func
    if isinstance(func, types.MethodType):
        cache, key = _of_methods, func.__func__
    if not isinstance(key, types.FunctionType | functools.partial):
        return _read(func)
    if (known := cache.get(key)) is None:
        known = cache[key] = _read(func)
    return known


def signature(func: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `func`, as `inspect.signature` does."""
    return call_parameters(func).signature


def _read(func: Callable[..., Any]) -> CallParameters:
    found = inspect.signature(func)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.parameters.values())
    code = getattr(getattr(func, "__func__", func), "__code__", None)
    never_waits = (
        inspect.iscoroutinefunction(func)
        and isinstance(code, types.CodeType)
        and all(instruction.opname != "YIELD_VALUE" for instruction in dis.get_instructions(code))
    )
    return CallParameters(found, frozenset(found.parameters), takes_all, never_waits)
