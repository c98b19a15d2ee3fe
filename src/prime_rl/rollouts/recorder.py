"""Records the model calls of one rollout and makes the rollout from them.

Each prompt starts with the token ids of an earlier turn if the chat template allows it, so training uses exactly the
sampled tokens in their own context.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from prime_rl.core.types import Conversation, Credit, Rollout
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from prime_rl.rollouts.clients.openai_chat_client import ChatServer, PromptTooLong
from prime_rl.rollouts.rendering.messages import Message, normalise, readable
from prime_rl.rollouts.rendering.renderer import Exchange, Prompt, Renderer
from prime_rl.rollouts.replies import Reply
from prime_rl.rollouts.trajectory_merging import Mask, SampleBuilder

_MAX_EXTENSION_TRIES = 2
"""Number of earlier turns that a prompt is compared with; each comparison renders the messages once or twice."""

_MAX_CONVERSATIONS = 4
"""Number of recent conversations of one rollout that can be continued; the last two turns of each are kept."""


class Recorder:
    """Sends the model calls of one rollout to its server and records the replies.

    An `InferenceClient` takes and returns token ids. A `ChatServer` takes and returns messages; its rollouts have no
    samples and cannot be trained on.

    Attributes:
        replies: every answered call in order, including calls that are no turn of the rollout.
        server_error: how the server failed, if it did.
        prompt_too_long: the prompt of a call did not fit.
    """

    def __init__(
        self,
        server: InferenceClient | ChatServer,
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
        self._seed = seed
        self._keep_messages = keep_messages
        self._num_calls = 0
        self._num_tool_calls = 0
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
        ask = self._server.complete if isinstance(self._server, ChatServer) else self._generate
        try:
            reply = await ask(normalise(messages), tools or [], sampling)
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
    ) -> Rollout:
        """Make the rollout; without samples if the server returns no tokens.

        Args:
            trained: its turns, and which of their tokens count. Other model calls are no part of the rollout.
            messages: the conversation in normal form.
            reward: the environment's score.
            metrics: its named scores.
            is_truncated: cut by a limit other than that of a completion.
            credits: of each turn, if turns are credited separately; turns with equal credits are one part.
        """
        text = tuple((message["role"], readable(message)) for message in messages)
        masks = {reply.turn: mask for reply, mask in trained.items()}
        parts = tuple(dict.fromkeys((credits or {}).values()))
        owners = {
            reply.turn: parts.index(credit) for reply, credit in (credits or {}).items() if reply.turn is not None
        }
        samples = self._builder.samples(lambda turn: masks.get(turn, False), owners if len(parts) > 1 else None)
        is_truncated = is_truncated or any(reply.is_truncated for reply in trained)
        if not self._keep_messages and self._renderer is not None:
            return Rollout(samples, reward, metrics, is_truncated, text, credits=parts)
        spans = [reply.versions for reply in trained]
        known = [span for span in spans if span is not None]
        has_versions = bool(known) and len(known) == len(spans)
        return Conversation(
            samples, reward, metrics, is_truncated, text,
            messages=tuple(messages),
            tools=tuple([*trained][-1].tools) if trained else (),
            completion_tokens=sum(reply.completion_tokens for reply in trained),
            versions=(min(old for old, _ in known), max(new for _, new in known)) if has_versions else None,
        )  # fmt: skip

    async def _generate(
        self, messages: list[Message], tools: list[dict[str, Any]], sampling: Mapping[str, Any]
    ) -> Reply:
        assert self._renderer is not None and not isinstance(self._server, ChatServer)
        prompt, base = self._prompt(self._renderer, messages, tools)
        available = self._seq_len - len(prompt.ids)
        if available <= 0:
            raise PromptTooLong(f"the prompt has {len(prompt.ids)} tokens, seq_len is {self._seq_len}")
        limits = {"max_tokens": min(available, sampling.get("max_tokens") or available)}
        if minimum := sampling.get("min_tokens"):
            limits["min_tokens"] = min(minimum, limits["max_tokens"])
        generation = await self._server.generate(prompt.ids.tolist(), {**sampling, **limits})
        self._remember(Exchange(messages, prompt, generation), base)
        parsed = self._renderer.parse(prompt, generation, tools)
        if stops := sampling.get("stop"):  # vLLM keeps the stop string in the tokens, other servers return no such text
            first_stop = "|".join(map(re.escape, stops))
            parsed = replace(parsed, content=re.split(first_stop, parsed.content, maxsplit=1)[0])
        first, self._num_tool_calls = self._num_tool_calls, self._num_tool_calls + len(parsed.calls)
        # Nine letters and digits, the format that the strictest templates require.
        call_ids = tuple(f"call{number:05d}" for number in range(first, self._num_tool_calls))
        turn = self._builder.add(prompt.ids, generation)
        sampled = len(generation.token_ids)
        return Reply(parsed, call_ids, generation.is_truncated, len(prompt.ids), sampled, tools, turn)

    def _prompt(
        self, renderer: Renderer, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[Prompt, Exchange | None]:
        """Render a prompt; return it with the exchange that it extends, if there is one."""
        if renderer.strategy == "interleaved":
            # Usually the last exchange; an earlier one if a harness goes back or the template renders it differently.
            known = (exchange for conversation in reversed(self._conversations) for exchange in reversed(conversation))
            bases = (exchange for exchange in known if messages[: len(exchange.messages)] == exchange.messages)
            for exchange in islice(bases, _MAX_EXTENSION_TRIES):
                if (prompt := renderer.extend_prompt(exchange, messages, tools or None)) is not None:
                    messages[: len(exchange.messages)] = exchange.messages  # store equal messages once
                    return prompt, exchange
        return renderer.render_prompt(messages, tools or None), None

    def _remember(self, exchange: Exchange, base: Exchange | None) -> None:
        """Store an exchange as the end of its conversation, which keeps only the exchange before it."""
        self._conversations = [conversation for conversation in self._conversations if conversation[-1] is not base]
        self._conversations.append([exchange] if base is None else [base, exchange])
        del self._conversations[:-_MAX_CONVERSATIONS]


def _derive_seed(numbers: Sequence[int]) -> int:
    """Return the seed that `SeedSequence(numbers)` generates; from an array of 32-bit words it takes half the time."""
    words = np.array(numbers, np.uint32) if all(0 <= number < 2**32 for number in numbers) else numbers
    return int(np.random.SeedSequence(words).generate_state(1)[0])
