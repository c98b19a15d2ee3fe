"""One rollout's side of the conversation with the engine: renders a turn, asks, and keeps what the engine reported.

Whatever asks for completions (a classic client, a v1 harness), each turn starts with the ids of an earlier one where
the chat template allows it, so the tokens that are trained on are the ones that were sampled, in their own context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost
from prime_rl.orchestrator.messages import Message, normalise
from prime_rl.orchestrator.renderer import Exchange, Prompt, Renderer
from prime_rl.orchestrator.samples import Turn, merge_turns
from prime_rl.orchestrator.tool_calls import Parsed
from prime_rl.types import Sample

_TRIES = 2
"""Earlier turns that a prompt is tried to extend; each costs two renderings."""


class PromptTooLong(Exception):
    """A turn's prompt leaves no room for a completion in `seq_len`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered turn.

    Attributes:
        parsed: what was sampled, as a message.
        call_ids: a name for each tool call, unique in the rollout.
        is_truncated: cut by `max_tokens`.
        prompt_tokens: how many tokens the engine was given.
        completion_tokens: how many it sampled.
        turn: the tokens themselves, where the server tells them.
        versions: oldest and newest policy version that may have sampled it, where the server tells no tokens but these.
    """

    parsed: Parsed
    call_ids: tuple[str, ...]
    is_truncated: bool
    prompt_tokens: int
    completion_tokens: int
    turn: Turn | None = None
    versions: tuple[int, int] | None = None

    @property
    def finish_reason(self) -> str:
        """Why the completion ended, in OpenAI's words."""
        if self.is_truncated:
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"


class Recorder(Protocol):
    """The turns of one rollout, however the server is asked.

    Attributes:
        tools: definitions of the tools that were offered last, in OpenAI's form.
        lost: how the server failed, if it did.
        overlong: a turn did not fit, so the rollout ended before its time.
    """

    tools: list[dict[str, Any]]
    lost: EngineLost | EngineError | None
    overlong: bool

    @property
    def turns(self) -> Sequence[Turn | Reply]:
        """Those that were answered, in order."""
        ...

    async def ask(
        self, messages: Sequence[Any], tools: list[dict[str, Any]] | None, sampling: Mapping[str, Any]
    ) -> Reply:
        """Sample the next message of a conversation; see `TurnRecorder.ask`."""
        ...

    def samples(self) -> tuple[Sample, ...]:
        """Give the turns as samples to train on; none where the server does not tell tokens."""
        ...

    @property
    def is_truncated(self) -> bool:
        """Whether the last completion was cut by a limit, or the next turn had no room."""
        ...

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled in all turns."""
        ...

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version of all turns; None where samples tell, or nobody does."""
        ...


class TurnRecorder:
    """The turns of one rollout that an `Engine` samples; a `Recorder` with tokens."""

    def __init__(self, engine: Engine, renderer: Renderer, seq_len: int, seed: Sequence[int] | None = None) -> None:
        """Record one rollout, whose samples may have `seq_len` tokens; each turn is seeded from `seed`, if given."""
        self.turns: list[Turn] = []
        self.tools: list[dict[str, Any]] = []
        self.lost: EngineLost | EngineError | None = None
        self.overlong = False
        self._engine = engine
        self._renderer = renderer
        self._seq_len = seq_len
        self._seed = seed
        self._exchanges: list[Exchange] = []
        self._calls = 0

    async def ask(
        self, messages: Sequence[Any], tools: list[dict[str, Any]] | None, sampling: Mapping[str, Any]
    ) -> Reply:
        """Sample the next message of a conversation.

        Args:
            messages: the whole conversation.
            tools: definitions in OpenAI's form; without any, no call is looked for.
            sampling: vLLM sampling parameters; `max_tokens` is lowered to what fits.

        Raises:
            PromptTooLong: the prompt leaves no room.
            EngineLost, EngineError: the engine failed; also kept in `lost`.
            ValueError: the messages hold something else than text.
        """
        self.tools = tools or []
        normal = normalise(messages)
        prompt = self._prompt(normal, tools or None)
        room = self._seq_len - len(prompt.ids)
        if room <= 0:
            self.overlong = True
            raise PromptTooLong(f"the prompt has {len(prompt.ids)} tokens, seq_len is {self._seq_len}")
        limit = {"max_tokens": min(room, sampling.get("max_tokens") or room)}
        try:
            generation = await self._engine.generate(prompt.ids, {**sampling, **limit, **self._turn_seed()})
        except (EngineError, EngineLost) as error:
            self.lost = error
            raise
        turn = Turn(prompt.ids, generation)
        self.turns.append(turn)
        self._exchanges.append(Exchange(normal, prompt, generation))
        parsed = self._renderer.parse(prompt, generation, tools or None)
        names = self._name(len(parsed.calls))
        return Reply(parsed, names, generation.is_truncated, len(prompt.ids), len(generation.token_ids), turn)

    def samples(self) -> tuple[Sample, ...]:
        """Give the turns as samples: grown as far as they extend each other, or one per turn if branching."""
        return merge_turns(self.turns, branching=self._renderer.strategy == "branching")

    @property
    def is_truncated(self) -> bool:
        """Whether the last completion was cut by a limit, or the next turn had no room."""
        return self.overlong or (bool(self.turns) and self.turns[-1].generation.is_truncated)

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled in all turns."""
        return sum(len(turn.generation.token_ids) for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int] | None:
        """None: the samples have the version of every token."""
        return None

    def _prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Prompt:
        if self._renderer.strategy == "interleaved":
            # Usually the last one; an earlier one if a harness goes back, or if the template takes the last amiss.
            begun = (exchange for exchange in reversed(self._exchanges) if _begin(messages, exchange.messages))
            for exchange in islice(begun, _TRIES):
                if (prompt := self._renderer.extend(exchange, messages, tools)) is not None:
                    return prompt
        return self._renderer.open(messages, tools)

    def _turn_seed(self) -> dict[str, int]:
        if self._seed is None:
            return {}
        return {"seed": int(np.random.SeedSequence([*self._seed, len(self.turns)]).generate_state(1)[0])}

    def _name(self, count: int) -> tuple[str, ...]:
        """Nine letters and digits: what the strictest templates ask of a call's id."""
        first, self._calls = self._calls, self._calls + count
        return tuple(f"call{number:05d}" for number in range(first, self._calls))


def _begin(messages: list[Message], earlier: list[Message]) -> bool:
    return messages[: len(earlier)] == earlier
