"""Verifiers environments behind one narrow adapter: an example in, scored rollouts with exact token ids out.

Verifiers runs the turns and the rubric; it talks to the engine through `RolloutClient`, which records for each turn
the ids, log-probabilities and versions that the engine reported.
"""

import asyncio
import importlib.util
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import verifiers as vf
from loguru import logger
from verifiers.clients.client import Client
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import Messages, Response, ResponseMessage, ResponseTokens, Tool, Usage

from prime_rl.configs.shared import EnvConfig, SamplingConfig
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost, Generation
from prime_rl.orchestrator.renderer import Message, Renderer
from prime_rl.orchestrator.samples import Turn, merge_turns
from prime_rl.types import Rollout

Row = Mapping[str, Any]


class EnvironmentFailed(Exception):
    """An environment could not finish a group; it is dropped as `error/<env>`. The message names the exception."""


class SampleTooLong(Exception):
    """A prompt does not fit into `seq_len`; its group is dropped as `overlong`."""


class RolloutClient(Client):
    """The model client of one rollout: renders, asks the engine, and records its turns. Never tokenises twice."""

    def __init__(self, engine: Engine, renderer: Renderer, seq_len: int, seed: Sequence[int] | None = None) -> None:
        """Serve one rollout whose samples may have `seq_len` tokens; each turn is seeded from `seed`, if given."""
        super().__init__(None)
        self.turns: list[Turn] = []
        self.lost: EngineLost | EngineError | None = None
        self._engine = engine
        self._renderer = renderer
        self._seq_len = seq_len
        self._seed = seed
        self._seen: list[Message] = []

    async def get_response(
        self, prompt: Messages, model: str, sampling_args: dict[str, Any], tools: list[Tool] | None = None, **_: Any
    ) -> Response:
        """Answer one turn of the environment; verifiers' whole interface to the model."""
        messages = [message.model_dump(exclude_none=True) for message in prompt]
        prompt_ids = self._prompt_ids(messages, await self.to_native_tools(tools))
        room = self._seq_len - len(prompt_ids)
        if room <= 0:
            raise OverlongPromptError(f"the prompt has {len(prompt_ids)} tokens, seq_len is {self._seq_len}")
        limit = {"max_tokens": min(room, sampling_args.get("max_tokens") or room)}
        try:
            generation = await self._engine.generate(prompt_ids, {**sampling_args, **limit, **self._turn_seed()})
        except (EngineError, EngineLost) as error:
            self.lost = error
            raise ModelError(str(error)) from error
        self.turns.append(Turn(prompt_ids, generation))
        text = self._renderer.decode(generation.token_ids.tolist())
        self._seen = [*messages, {"role": "assistant", "content": text}]
        return _response(model, prompt_ids, generation, text)

    def _turn_seed(self) -> dict[str, int]:
        if self._seed is None:
            return {}
        return {"seed": int(np.random.SeedSequence([*self._seed, len(self.turns)]).generate_state(1)[0])}

    def _prompt_ids(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        if not self.turns:
            return self._renderer.render(messages, tools)
        last = self.turns[-1]
        context = last.prompt_ids + last.generation.token_ids.tolist()
        return self._renderer.extend(context, self._seen, messages, tools)

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        """Give the definition of a tool in the form that chat templates expect."""
        return {"type": "function", "function": tool.model_dump(exclude_none=True)}

    async def close(self) -> None:
        """Do nothing: the engine outlives the rollout."""

    # The rest of verifiers' interface serves the default get_response, which is overridden as a whole.
    def setup_client(self, config: Any) -> None:
        """Unused."""

    async def to_native_prompt(self, messages: Messages) -> tuple[Messages, dict[str, Any]]:
        """Unused."""
        return messages, {}

    async def get_native_response(self, *_: Any, **__: Any) -> None:
        """Unused."""

    async def raise_from_native_response(self, response: Any) -> None:
        """Unused."""

    async def from_native_response(self, response: Any) -> Any:
        """Unused."""


class Environment:
    """One verifiers environment of the classic kind."""

    def __init__(self, config: EnvConfig, renderer: Renderer, split: Literal["train", "eval"] = "train") -> None:
        """Load the environment; ConfigError if its package is not installed or refuses its arguments."""
        self.name = config.label
        self._renderer = renderer
        self._env = _load(config)
        self._rows = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        if len(self._rows) == 0:
            raise ConfigError(f"environment {config.id!r} has no examples; check env.args")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Return example `index` of the data set."""
        row: Row = self._rows[index]
        return row

    def prompt_tokens(self, row: Row) -> int:
        """Return the length of the first prompt of an example, in tokens."""
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return len(self._renderer.render(messages))

    async def run_group(
        self,
        row: Row,
        count: int,
        engine: Engine,
        sampling: Mapping[str, Any],
        seq_len: int,
        seed: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Play and score `count` rollouts of one example.

        Args:
            row: the example.
            count: G.
            engine: the server that samples all of them.
            sampling: vLLM sampling parameters; `max_tokens` is lowered to what fits into `seq_len`.
            seq_len: longest sample, tokens.
            seed: what the group's sampling is seeded from; each rollout and turn derives its own. None is unseeded.

        Raises:
            EnvironmentFailed: the environment raised, or reported an error of one rollout.
            SampleTooLong: the first prompt leaves no room for a completion.
            EngineLost, EngineError: the server failed; that is not the environment's fault.
        """
        seeds = [None if seed is None else [*seed, index] for index in range(count)]
        clients = [RolloutClient(engine, self._renderer, seq_len, rollout_seed) for rollout_seed in seeds]
        try:
            states = await self._play(row, clients, sampling)
        except Exception as error:  # foreign code: whatever it raises is its group's end, not the run's
            _raise_engine_failure(clients)
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            raise EnvironmentFailed(f"{type(cause).__name__}: {cause}") from error
        _raise_engine_failure(clients)
        for state in states:
            if state.get("error"):
                raise EnvironmentFailed(repr(state["error"]))
        if not all(client.turns for client in clients):
            raise SampleTooLong(f"a prompt of environment {self.name} does not fit into seq_len = {seq_len}")
        try:
            return [_rollout(state, client.turns) for state, client in zip(states, clients, strict=True)]
        except TypeError as error:
            raise EnvironmentFailed(f"a reward or metric is not a number: {error}") from error

    async def _play(self, row: Row, clients: Sequence[RolloutClient], sampling: Mapping[str, Any]) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._env.rollout(dict(row), client, "policy", dict(sampling))) for client in clients
            ]
        states = [task.result() for task in tasks]
        await self._env.rubric.score_group(states)
        for state in states:
            await self._env.rubric.cleanup(state)
        return states


def _load(config: EnvConfig) -> Any:
    module = config.id.split("/")[-1].replace("-", "_")
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"environment {config.id!r} (env.id) is not installed; run `uv pip install -e environments/{module}` "
            f"for one of this repository, `prime env install {config.id}` for one of the hub"
        )
    with _keep_signal_handlers():
        try:
            return vf.load_environment(config.id, **config.args)
        except Exception as error:  # foreign code again: its refusal is the user's to mend
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"environment {config.id!r} with env.args = {config.args} does not load: {reason}"
            ) from error


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Undo the SIGINT and SIGTERM handlers that verifiers installs in every environment's constructor."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _raise_engine_failure(clients: Sequence[RolloutClient]) -> None:
    for client in clients:
        if client.lost is not None:
            raise client.lost


def _rollout(state: Any, turns: Sequence[Turn]) -> Rollout:
    messages = [*state["prompt"], *state["completion"]]
    return Rollout(
        samples=merge_turns(turns),
        reward=float(state["reward"]),
        metrics={name: float(value) for name, value in (state["metrics"] or {}).items()},
        is_truncated=turns[-1].generation.is_truncated,
        text=tuple((_field(message, "role"), str(_field(message, "content"))) for message in messages),
    )


def _field(message: Any, name: str) -> Any:
    """Read a message's field, be it a dict or verifiers' own class."""
    return message.get(name) if isinstance(message, dict) else getattr(message, name)


def _response(model: str, prompt_ids: list[int], generation: Generation, text: str) -> Response:
    completion_ids = generation.token_ids.tolist()
    tokens = ResponseTokens(
        prompt_ids=prompt_ids,
        prompt_mask=[0] * len(prompt_ids),
        completion_ids=completion_ids,
        completion_mask=[1] * len(completion_ids),
        completion_logprobs=generation.logprobs.tolist(),
    )
    message = ResponseMessage(
        content=text,
        finish_reason="length" if generation.is_truncated else "stop",
        is_truncated=generation.is_truncated,
        tokens=tokens,
    )
    used, sampled = len(prompt_ids), len(completion_ids)
    usage = Usage(prompt_tokens=used, reasoning_tokens=0, completion_tokens=sampled, total_tokens=used + sampled)
    return Response(id="", created=0, model=model, usage=usage, message=message)


def sampling_parameters(config: SamplingConfig) -> dict[str, Any]:
    """Give the sampling configuration as vLLM's parameters, without the seed, which differs by request."""
    parameters = config.model_dump(include={"temperature", "top_p", "top_k", "min_p", "min_tokens"})
    return parameters | ({"max_tokens": config.max_tokens} if config.max_tokens else {})


def check_prompts(environment: Environment, seq_len: int, limit: int = 2000) -> None:
    """Fail early on examples that cannot be trained on.

    Looks at the first `limit` examples; later ones are dropped as `overlong` when they come up.

    Raises:
        ConfigError: a prompt has `seq_len` tokens or more.
    """
    count = min(len(environment), limit)
    for index in range(count):
        length = environment.prompt_tokens(environment.row(index))
        if length >= seq_len:
            raise ConfigError(
                f"the prompt of example {index} of environment {environment.name!r} has {length} tokens, which leaves "
                f"no room in seq_len = {seq_len}; raise orchestrator.seq_len or filter the data set"
            )
    logger.info("environment {}: {} examples, {} prompts checked", environment.name, len(environment), count)
