"""Records the model calls of one rollout and makes the rollout from them.

Each prompt starts with the token ids of an earlier turn if the chat template allows it, so training uses exactly the
sampled tokens in their own context. Turns that extend each other exactly are merged into one sample.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.types import Conversation, Credit, Rollout, Routes, Sample
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import ChatServer, PromptTooLong
from prime_rl.rollouts.rendering.messages import (
    Generation,
    GrowingSequence,
    Message,
    Reply,
    Sampler,
    ToolCall,
    Turn,
    normalise,
    readable,
)
from prime_rl.rollouts.rendering.renderer import Exchange, Prompt, Renderer

_MAX_EXTENSION_TRIES = 3
"""Number of earlier turns that a prompt is compared with; each comparison renders the messages up to three times."""

_MAX_CONVERSATIONS = 4
"""Number of recent conversations of one rollout that can be continued; the last two turns of each are kept."""

_MAX_SHORTENING = 4

Mask = bool | NDArray[np.bool_]
"""Which sampled tokens of a turn are trained on: all, none, or one entry per token."""


class Recorder:
    """Sends the model calls of one rollout to its server and records the replies.

    A `Sampler` takes and returns token ids. A `ChatServer` takes and returns messages; its rollouts have no
    samples and cannot be trained on.

    Attributes:
        replies: every answered call in order, including calls that are no turn of the rollout.
        server_error: how the server failed, if it did.
        prompt_too_long: the prompt of a call did not fit.
    """

    def __init__(
        self,
        server: Sampler | ChatServer,
        renderer: Renderer | None = None,
        seq_len: int = 0,
        seed: Sequence[int] | None = None,
        keep_messages: bool = False,
    ) -> None:
        """Record one rollout.

        Args:
            server: answers the calls.
            renderer: converts between messages and tokens; None for a `ChatServer`.
            seq_len: maximum sample length, tokens; not used for a `ChatServer`.
            seed: each call derives its own seed from it. None: unseeded.
            keep_messages: make the rollout a `Conversation`, as always with a `ChatServer`.
        """
        self.replies: list[Reply] = []
        self.server_error: InferenceServerLost | InferenceError | None = None
        self.prompt_too_long = False
        self._server = server
        self._renderer = renderer
        self._seq_len = seq_len
        # A normaliser of the tokenizer may shorten text, so the margin is wide.
        self._max_characters = _MAX_SHORTENING * seq_len * renderer.longest_token if renderer is not None else 0
        self._seed = seed
        self._keep_messages = keep_messages
        self._num_calls = 0
        self._num_tool_calls = 0
        self._false_forks: dict[Turn, tuple[str, Turn]] = {}  # the cause, and the turn that it continues or repeats
        self._builder = SampleBuilder(branching=renderer is not None and renderer.strategy == "branching")
        self._conversations: list[list[Exchange]] = []

    async def ask(
        self, messages: Sequence[Any], tools: list[dict[str, Any]] | None, sampling: Mapping[str, Any]
    ) -> Reply:
        """Sample the next message of a whole conversation.

        Without tools no tool call is parsed. Of the vLLM sampling parameters, `max_tokens` and `min_tokens` are lowered
        to fit into `seq_len`.

        Raises:
            PromptTooLong: the prompt leaves no space for a completion.
            InferenceServerLost, InferenceError: the server failed; also kept in `server_error`.
            ValueError: the messages contain something other than text, or the chat template rejects them.
        """
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if self._seed is not None:
            sampling = {**sampling, "seed": _derive_seed([*self._seed, number])}
        try:
            if isinstance(self._server, ChatServer):
                reply = await self._server.complete(normalise(messages), tools or [], sampling)
            else:
                reply = await self._generate(self._server, normalise(messages), tools or [], sampling)
        except (PromptTooLong, InferenceError, InferenceServerLost) as error:
            if isinstance(error, PromptTooLong):
                self.prompt_too_long = True
            else:
                self.server_error = error
            raise
        self.replies.append(reply)
        return reply

    def rollout(
        self,
        trained: Mapping[Reply, Mask],
        messages: Sequence[Message],
        reward: float,
        metrics: dict[str, float],
        is_truncated: bool,
        credits: Mapping[Reply, Credit] | None = None,
        weights: dict[str, float] | None = None,
    ) -> Rollout:
        """Make the rollout; without samples if the server returns no tokens.

        Args:
            trained: its turns, and which of their tokens count. Other model calls are no part of the rollout.
            messages: the conversation in normal form.
            reward: the environment's score.
            metrics: its named scores.
            is_truncated: cut by a limit other than that of a completion.
            credits: of each turn, if turns are credited separately; turns with equal credits are one part.
            weights: of the metrics that are reward functions.
        """
        text = tuple((message["role"], readable(message)) for message in messages)
        masks = {reply.turn: mask for reply, mask in trained.items()}
        parts = tuple(dict.fromkeys((credits or {}).values()))
        owners = {
            reply.turn: parts.index(credit) for reply, credit in (credits or {}).items() if reply.turn is not None
        }
        samples = self._builder.samples(lambda turn: masks.get(turn, False), owners if len(parts) > 1 else None)
        given = sum(int(np.sum(np.broadcast_to(mask, reply.completion_tokens))) for reply, mask in trained.items())
        counts = Counter(
            f"false_forks/{cause}"
            for turn, (cause, origin) in self._false_forks.items()
            if all(one in masks and np.any(masks[one]) for one in (turn, origin))
        )
        if samples:
            counts["tokens_trained_twice"] = sum(int(sample.loss_mask.sum()) for sample in samples) - given
        is_truncated = is_truncated or any(reply.is_truncated for reply in trained)
        tools = tuple([*trained][-1].tools) if trained else ()
        if not self._keep_messages and self._renderer is not None:
            is_plain = not tools and all(message.keys() <= {"role", "content"} for message in messages)
            kept = () if is_plain else tuple(messages)
            return Rollout(
                samples, reward, metrics, is_truncated, text,
                credits=parts, messages=kept, tools=tools, weights=weights or {}, sample_counts=dict(counts),
            )  # fmt: skip
        spans = [reply.versions for reply in trained]
        known = [span for span in spans if span is not None]
        has_versions = bool(known) and len(known) == len(spans)
        return Conversation(
            samples, reward, metrics, is_truncated, text,
            messages=tuple(messages),
            tools=tools,
            weights=weights or {},
            sample_counts=dict(counts),
            completion_tokens=sum(reply.completion_tokens for reply in trained),
            versions=(min(old for old, _ in known), max(new for _, new in known)) if has_versions else None,
        )  # fmt: skip

    async def _generate(
        self, sampler: Sampler, messages: list[Message], tools: list[dict[str, Any]], sampling: Mapping[str, Any]
    ) -> Reply:
        assert self._renderer is not None, "a sampler needs token ids"
        # Rendering tens of megabytes, which an agent may send, would keep the event loop of all rollouts for minutes.
        if (size := sum(len(message["content"]) for message in messages)) > self._max_characters:
            raise self._too_long(size // self._renderer.longest_token)
        prompt, base, fork = self._prompt(self._renderer, messages, tools)
        available = self._seq_len - len(prompt.ids)
        if available <= 0:
            raise self._too_long(len(prompt.ids))
        limits = {"max_tokens": min(available, sampling.get("max_tokens") or available)}
        if minimum := sampling.get("min_tokens"):
            limits["min_tokens"] = min(minimum, limits["max_tokens"])
        if known := self._builder.find_known_routes(prompt.ids):
            limits["routed_experts_prompt_start"] = known
        generation = await sampler.generate(prompt.ids.tolist(), {**sampling, **limits})
        if self._keep_messages:  # such rollouts are not trained on
            generation = replace(generation, routes=None)
        parsed, stop = self._renderer.parse(prompt, generation, tools), None
        if stops := sampling.get("stop"):  # vLLM keeps the stop string in the tokens, other servers return no such text
            text_length, ids = self._renderer.text_length, generation.token_ids.tolist()
            searched = text_length(ids) - text_length(ids[: limits.get("min_tokens", 0)])
            content, stop = _before_stop(parsed.content, stops, searched)
            parsed = replace(parsed, content=content)
        call_ids = self._name_calls(parsed.calls, messages)
        turn = self._builder.add(prompt.ids, generation)
        if fork is not None and (turn.parent is None or turn.parent.sequence is not turn.sequence):
            self._false_forks[turn] = fork
        self._remember(Exchange(messages, prompt, generation, tools, turn), base)
        sampled = len(generation.token_ids)
        return Reply(parsed, call_ids, generation.is_truncated, len(prompt.ids), sampled, tools, turn, stop=stop)

    def _too_long(self, num_tokens: int) -> PromptTooLong:
        return PromptTooLong(f"prompt is too long: {num_tokens} tokens > {self._seq_len} maximum (seq_len)")

    def _name_calls(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> tuple[str, ...]:
        """Return an id for each call: the model's if it is new in the conversation, as templates write it into results.

        Otherwise nine letters and digits, the format that the strictest templates require.
        """
        known = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
        names = list[str]()
        for number, call in enumerate(calls, self._num_tool_calls):
            names.append(call.id if call.id and call.id not in known else f"call{number:05d}")
            known.add(names[-1])
        self._num_tool_calls += len(calls)
        return tuple(names)

    def _prompt(
        self, renderer: Renderer, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[Prompt, Exchange | None, tuple[str, Turn] | None]:
        """Render a prompt; return it with the exchange that it extends, and the cause and turn of a false fork."""
        fork = None
        if renderer.strategy == "interleaved":
            # Usually the last exchange; an earlier one if a harness goes back or the template renders it differently.
            known = [exchange for conversation in reversed(self._conversations) for exchange in reversed(conversation)]
            known.sort(key=lambda exchange: -len(exchange.messages))  # the longest first, of these the latest
            same = next((one.turn for one in known if one.messages == messages), None)
            fork = None if same is None else ("repeated", same)
            bases = (exchange for exchange in known if messages[: len(exchange.messages)] == exchange.messages)
            for exchange in islice(bases, _MAX_EXTENSION_TRIES):
                shown = renderer.shown_tools(exchange, tools)
                if (prompt := renderer.extend_prompt(exchange, messages, shown)) is not None:
                    later = [one for one in known if len(one.messages) > len(exchange.messages)]  # not extended
                    fork = fork or _false_fork(renderer, later, messages, tools)
                    messages[: len(exchange.messages)] = exchange.messages  # store equal messages once
                    return prompt, exchange, fork
            fork = fork or _false_fork(renderer, known, messages, tools)
        return renderer.render_prompt(messages, tools or None), None, fork

    def _remember(self, exchange: Exchange, base: Exchange | None) -> None:
        """Store an exchange as the end of its conversation, which keeps only the exchange before it."""
        self._conversations = [conversation for conversation in self._conversations if conversation[-1] is not base]
        self._conversations.append([exchange] if base is None else [base, exchange])
        del self._conversations[:-_MAX_CONVERSATIONS]


def _false_fork(
    renderer: Renderer, known: Sequence[Exchange], messages: list[Message], tools: list[dict[str, Any]]
) -> tuple[str, Turn] | None:
    """Return why a prompt does not extend the tokens of a turn that it continues, and that turn; None if it edits it.

    `cut`: the last reply was cut. `tools`: other tools are offered. `rendering`: the template writes the past
    differently. `system`: only the system prompt differs. `form`: only white space or reasoning differ.
    """
    for exchange in known:
        if exchange.turn is None or not _has_reply(renderer, exchange, messages):
            continue
        pairs = [(one, other) for one, other in zip(exchange.messages, messages, strict=False) if one != other]
        cause = None
        if not pairs:
            changed = "tools" if (tools or None) != (exchange.tools or None) else "rendering"
            cause = "cut" if exchange.generation.is_truncated else changed
        elif all(one["role"] == other["role"] and one["role"] in ("system", "developer") for one, other in pairs):
            cause = "system"
        elif all(
            one["role"] == other["role"]
            and one.get("tool_calls") == other.get("tool_calls")
            and _words(one["content"], one["role"]) == _words(other["content"], one["role"])
            for one, other in pairs
        ):
            cause = "form"
        if cause is not None:
            return cause, exchange.turn
    return None


def _has_reply(renderer: Renderer, exchange: Exchange, messages: Sequence[Message]) -> bool:
    """Return whether the message after those of a turn is its reply, with or without its reasoning."""
    if len(messages) <= len(exchange.messages):
        return False
    message = messages[len(exchange.messages)]
    parsed = renderer.parse(exchange.prompt, exchange.generation, exchange.tools)
    return (
        message["role"] == "assistant"
        and [call["function"]["name"] for call in message.get("tool_calls", ())] == [one.name for one in parsed.calls]
        and _words(message["content"]) == _words(parsed.content)
    )


def _words(content: str, role: str = "assistant") -> list[str]:
    """Return the words of a content, that of the assistant without its reasoning: others may quote some."""
    return (content.rpartition("</think>")[2] if role == "assistant" else content).split()


def _before_stop(text: str, stops: Sequence[str], searched: int) -> tuple[str, str | None]:
    """Return the text before the first stop string to end in its last `searched` characters, and this; None without.

    As vLLM does, which does not look for stop strings before `min_tokens`.
    """
    starts = {stop: text.find(stop, max(0, len(text) - searched - len(stop) + 1)) for stop in stops}
    ends = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
    return (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)


def _derive_seed(numbers: Sequence[int]) -> int:
    """Return the seed that `SeedSequence(numbers)` generates; from an array of 32-bit words it takes half the time."""
    words = np.array(numbers, np.uint32) if all(0 <= number < 2**32 for number in numbers) else numbers
    return int(np.random.SeedSequence(words).generate_state(1)[0])


class SampleBuilder:
    """Makes samples from the turns of one rollout. The ids of a conversation are stored once.

    A turn extends an earlier one if its prompt starts with all ids of that turn. The ids between them come from the
    environment and are masked. Any other prompt starts a new sample, so every trained token keeps the context in which
    it was sampled. If two turns extend the same turn, the first one's sample contains it. With `branching`, every turn
    becomes a separate sample.
    """

    def __init__(self, branching: bool = False) -> None:
        self._sequences: dict[GrowingSequence, list[Turn]] = {}
        self._turns: list[Turn] = []
        self._branching = branching

    def add(self, prompt_ids: NDArray[np.int32], generation: Generation) -> Turn:
        """Add the completion of `prompt_ids` (int32)."""
        ids = np.concatenate([prompt_ids, generation.token_ids])
        parent = None if self._branching else self._find_parent(prompt_ids)
        if parent is not None and parent.end == len(parent.sequence.ids):
            sequence = parent.sequence
            sequence.ids = ids
        else:
            sequence = GrowingSequence(ids)
        turn = Turn(sequence, len(prompt_ids), generation, parent)
        self._sequences.setdefault(sequence, []).append(turn)
        self._turns.append(turn)
        return turn

    def find_known_routes(self, prompt_ids: NDArray[np.int32]) -> int:
        """Return the number of first tokens of a prompt whose routes an earlier turn has recorded."""
        if self._branching or not any(turn.generation.routes for turn in self._turns):
            return 0
        parent = self._find_parent(prompt_ids)
        return 0 if parent is None or parent.generation.routes is None else parent.end - 1

    def samples(
        self, trained: Callable[[Turn], Mask] = lambda _: True, credits: Mapping[Turn, int] | None = None
    ) -> tuple[Sample, ...]:
        """Return the samples. Each trained token is in exactly one of them.

        Other tokens are masked if trained tokens follow, and removed otherwise. `credits` has the index of each turn's
        credit, if turns are credited separately.
        """
        masks = {turn: mask for turn in self._turns if (mask := trained(turn)) is True or np.any(mask)}
        inner = {ancestor for turn in masks for ancestor in _ancestors(turn)}
        remaining = dict(masks)
        paths = []
        for last in masks:
            if last not in inner:
                path = [turn for turn in [last, *_ancestors(last)] if turn in remaining]
                paths.append([(turn, remaining.pop(turn)) for turn in reversed(path)])
        order = {turn: number for number, turn in enumerate(masks)}
        return tuple(_sample(path, credits) for path in sorted(paths, key=lambda path: order[path[0][0]]))

    def _find_parent(self, prompt_ids: NDArray[np.int32]) -> Turn | None:
        """Return the longest turn whose ids the prompt starts with."""
        best = None
        for sequence, turns in self._sequences.items():
            length = min(len(prompt_ids), len(sequence.ids))
            differs = prompt_ids[:length] != sequence.ids[:length]
            common = int(differs.argmax()) if differs.any() else length
            found = next((turn for turn in reversed(turns) if turn.end <= common), None)
            if found is not None and (best is None or found.end >= best.end):
                best = found
        return best


def _ancestors(turn: Turn) -> Iterator[Turn]:
    while turn.parent is not None:
        turn = turn.parent
        yield turn


def _sample(turns: list[tuple[Turn, Mask]], credits: Mapping[Turn, int] | None) -> Sample:
    """Return the sample that ends with the last of `turns` and trains on all of them."""
    last, _ = turns[-1]
    loss_mask, logprobs = np.zeros(last.end, np.bool_), np.zeros(last.end, np.float32)
    versions = np.full(last.end, -1, np.int32)
    owners = None if credits is None else np.zeros(last.end, np.int32)
    for turn, mask in turns:
        span = slice(turn.start, turn.end)
        loss_mask[span] = mask
        if credits is not None and owners is not None:
            owners[span] = credits[turn]
        logprobs[span], versions[span] = turn.generation.logprobs, turn.generation.versions
        if mask is not True:
            logprobs[span][~loss_mask[span]], versions[span][~loss_mask[span]] = 0, -1
    return Sample(last.sequence.ids[: last.end], loss_mask, logprobs, versions, owners, _routes(last))


def _routes(last: Turn) -> Routes | None:
    """Return the routes of the tokens up to the end of a turn, each from the first turn that has recorded it."""
    turns = [last, *_ancestors(last)]
    recorded = [(turn, turn.generation.routes) for turn in turns if turn.generation.routes is not None]
    if len(recorded) < len(turns):
        return None
    arrays = [(slice(turn.generation.routes_start, turn.end - 1), routes.array) for turn, routes in recorded]
    whole = np.zeros((last.end, *arrays[0][1].shape[1:]), arrays[0][1].dtype)
    for span, array in arrays:  # the earliest turn last
        whole[span] = array
    return Routes.of(whole)
