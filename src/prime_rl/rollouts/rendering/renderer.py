"""Renders messages to token ids with the chat template, and parses completions back to messages.

Sampled tokens are never tokenised again. A prompt that follows a completion starts with the engine's own token ids if
it continues the same conversation: the same messages before the completion, and a completion that parses to the same
message, which may lack its reasoning. With the history "template", the template must render it with the same text too.
Only the new text is tokenised then. Otherwise the whole conversation is rendered, and a new sample begins.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from loguru import logger
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from prime_rl.configs.rendering import RenderingConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.rollouts.rendering.completion_parsers import PARSERS, gpt_oss, hermes, parser_of_template, split_reasoning
from prime_rl.rollouts.rendering.messages import (
    Generation,
    Message,
    Parsed,
    ToolCall,
    Turn,
    normalise,
    with_text_arguments,
)

TrajectoryStrategy = Literal["interleaved", "branching"]

_CACHED_PROMPTS = 16

_PLACEHOLDER = "c0mpl3t10n"
"""Replaces the completion to find out what the template writes after it."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered prompt.

    Attributes:
        text: the template's rendering of the messages.
        ids: int32, the tokens of `text`, with earlier completions as they were sampled.
        tools: the definitions in it.
    """

    text: str
    ids: NDArray[np.int32]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One turn that a later one may extend: messages in normal form, their prompt, the completion, and the tools."""

    messages: list[Message]
    prompt: Prompt
    generation: Generation
    tools: list[Any] | None = None
    turn: Turn | None = None


class Renderer:
    """Applies the chat template of a tokenizer, and parses completions."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        config: RenderingConfig | None = None,
        strategy: TrajectoryStrategy = "interleaved",
    ) -> None:
        """Raises ConfigError if neither the tokenizer nor the configuration has a chat template."""
        self.strategy = strategy
        self._tokenizer = tokenizer
        # The wrapper of transformers costs more time than the tokenisation.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a tokenizer file may enable both; the wrapper disables them
        self._backend.no_padding()
        self._cache: deque[tuple[list[Message], list[Any] | None, Prompt]] = deque(maxlen=_CACHED_PROMPTS)
        self._config = config or RenderingConfig()
        self._template = read_template(self._config.chat_template)
        if self._template is None and tokenizer.chat_template is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path} has no chat template; set tokenizer.name to one that has a "
                "template, or rendering.chat_template to a file"
            )
        kind, template = self._config.tool_call_parser, str(self._template or tokenizer.chat_template)
        found = parser_of_template(template) if kind == "auto" else PARSERS[kind]
        self._parse, self._has_unknown_calls = found or hermes, found is None
        self._special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    @classmethod
    def load(
        cls,
        name: str,
        trust_remote_code: bool = False,
        config: RenderingConfig | None = None,
        strategy: TrajectoryStrategy = "interleaved",
    ) -> "Renderer":
        """Load the tokenizer `name`, a local directory or a Hugging Face id; ConfigError if it cannot be loaded.

        Reads tokenizer.json directly, because `AutoTokenizer` imports torch.
        """
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"tokenizer of model {name!r} cannot be loaded (model.name, tokenizer.name): {reason}"
            ) from None
        return cls(tokenizer, config, strategy)

    def render(self, messages: Sequence[Any], tools: list[Any] | None = None) -> list[int]:
        """Render `messages` to ids, with the header of the assistant's turn appended; raises as `render_prompt`."""
        return self.render_prompt(normalise(messages), tools).ids.tolist()

    def render_prompt(self, messages: list[Message], tools: list[Any] | None = None) -> Prompt:
        """Render a whole conversation in normal form, with the header of the assistant's turn appended.

        Raises:
            ValueError: the chat template rejects the messages.
        """
        for known, with_tools, prompt in self._cache:  # the rollouts of a group start with the same messages
            if known == messages and with_tools == tools:
                return prompt
        text = self._text(messages, tools)
        prompt = Prompt(text, np.array(self._encode(text), np.int32), tools)
        self._cache.append((messages, tools, prompt))
        return prompt

    def shown_tools(self, last: Exchange, tools: list[Any]) -> list[Any] | None:
        """Return the tools of a prompt on top of `last`: the earlier ones if an agent offers none, as for a summary.

        Not with the history "template".
        """
        return tools or (last.prompt.tools if self._config.history == "sampled" else None)

    def extend_prompt(self, last: Exchange, messages: list[Message], tools: list[Any] | None = None) -> Prompt | None:
        """Render the next turn on top of the exact token ids of an earlier one.

        `messages` are in normal form: the messages of the last turn, its completion, and new ones.

        Returns:
            The ids of the last prompt, the sampled ids, and the ids of the text that the template writes after them.
            None if the messages changed, the completion was cut before its end token, or the template does not end it
            with this token; with the history "template" also if the template renders the past differently (strips
            reasoning, writes another date).
        """
        count, sampled = len(last.messages), last.generation.token_ids.tolist()
        if last.generation.is_truncated or not sampled or sampled[-1] not in self._special:
            return None
        if messages[:count] != last.messages or len(messages) <= count or messages[count]["role"] != "assistant":
            return None
        text, after = self._text(messages, tools), None
        if text.startswith(last.prompt.text):
            after = self._after_completion(text, last, sampled, messages, tools)
        if after is None and self._config.history == "sampled" and (tools or None) == (last.prompt.tools or None):
            after = self._after_reply(text, last, messages, tools)
        if after is None:
            return None
        tail = self._encode(after)
        if tail[0] != sampled[-1]:
            return None
        ids = np.concatenate([last.prompt.ids, last.generation.token_ids, np.array(tail[1:], np.int32)])
        return Prompt(text, ids, tools)

    def _after_completion(
        self, text: str, last: Exchange, sampled: list[int], messages: list[Message], tools: list[Any] | None
    ) -> str | None:
        """Return the part of `text` from the end token of the last completion; None if the message there differs."""
        begin, completion = len(last.prompt.text), self._decode(sampled)
        if text.startswith(completion, begin):  # identical text, as in nearly all cases
            return text[begin + len(completion) - len(self._special[sampled[-1]]) :]
        after = self._text_after_message(messages, len(last.messages), tools, self._special[sampled[-1]])
        if after is None or not text.endswith(after):
            return None
        end = len(text) - len(after)
        if begin > end or _PLACEHOLDER in text:
            return None
        rendered, completion, opened = text[begin:end], self._decode(sampled[:-1]), _opens_reasoning(last.prompt.text)
        is_same = rendered == completion or (
            self._comparable(rendered, opened, tools) == self._comparable(completion, opened, tools)
        )
        return after if is_same else None

    def _after_reply(self, text: str, last: Exchange, messages: list[Message], tools: list[Any] | None) -> str | None:
        """Return the part of `text` from the end token of the last reply, however the template writes the reply itself.

        None if the message is another one: other content or calls, reasoning that is neither its own nor left out.
        Agents add arguments with their defaults.
        """
        message, opened = messages[len(last.messages)], _opens_reasoning(last.prompt.text)
        parsed = self.parse(last.prompt, last.generation, last.tools)
        content, reasoning = message["content"], message.get("reasoning_content")
        if "</think>" in content and not reasoning:
            reasoning, content = split_reasoning(content, opened)
        said, own = parsed.content, parsed.reasoning
        if "</think>" in said and not own:
            own, said = split_reasoning(said, opened)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if content.strip() != said.strip() or (reasoning or own or "").strip() != (own or "").strip():
            return None
        if len(calls) != len(parsed.calls) or not all(map(_is_call, calls, parsed.calls)):
            return None
        end = self._special[last.generation.token_ids.tolist()[-1]]
        after = self._text_after_message(messages, len(last.messages), tools, end)
        if after is None or _PLACEHOLDER in text or not text.endswith(after):
            return None
        return after if self._is_in_order(messages, len(last.messages), tools, end) else None

    def _is_in_order(self, messages: list[Message], index: int, tools: list[Any] | None, end: str) -> bool:
        """Return whether the template writes earlier messages and tools before message `index`, and then later ones.

        Only then is the text after the message all that a continued prompt lacks. Templates exist that collect system
        messages at the top, write tools before the last question, quote a reply, or join messages.
        """
        marks = [f"{_PLACEHOLDER}_{number}_" for number in range(len(messages) + 1)]
        marked = [dict(message, content=mark) for message, mark in zip(messages, marks, strict=False)]
        marked[index].pop("reasoning_content", None)
        if calls := marked[index].get("tool_calls"):
            function = dict(calls[-1]["function"], arguments={marks[index]: marks[index]})
            marked[index]["tool_calls"] = [*calls[:-1], dict(calls[-1], function=function)]
        tool = {"name": marks[-1], "description": marks[-1], "parameters": {"type": "object", "properties": {}}}
        with suppress(ValueError):  # the template rejects the marks
            text = self._text(marked, [{"type": "function", "function": tool}] if tools else None)
            before, _, after = text.rpartition(marks[index])
            start = after.find(end)
            places = [after.find(mark, start) for mark in marks[index + 1 : -1]]
            return (
                start >= 0
                and places == sorted(places)
                and all(place >= 0 for place in places)
                and all(text.count(mark) == 1 for mark in marks[index + 1 : -1])
                and not any(mark in after for mark in (*marks[:index], marks[-1]))
                and not any(mark in before for mark in marks[index + 1 : -1])
            )
        return False

    def parse(self, prompt: Prompt, generation: Generation, tools: list[Any] | None = None) -> Parsed:
        """Parse a completion: content without special tokens, calls if there are tools, reasoning if configured.

        The parser gets the special tokens, because some formats mark calls with them.
        """
        ids = generation.token_ids.tolist()
        if ids and not generation.is_truncated and ids[-1] in self._special:
            ids = ids[:-1]
        if tools and self._has_unknown_calls:
            self._has_unknown_calls = False  # once
            logger.warning(
                "the chat template has no format of tool calls that is known, so only <tool_call>{...}</tool_call> is "
                "read; set rendering.tool_call_parser"
            )
        text = self._decode(ids)
        parsed, before = self._read(text, _opens_reasoning(prompt.text), tools)
        content, reasoning = parsed.content, parsed.reasoning
        if self._config.reasoning_parser == "none" and self._parse is not gpt_oss:
            content, reasoning = before + content, None
        for token in {self._special[i] for i in ids if i in self._special}:
            content = content.replace(token, "")
            reasoning = reasoning and reasoning.replace(token, "")
        return Parsed(content, parsed.calls, reasoning)

    def _read(self, text: str, opened: bool, tools: list[Any] | None) -> tuple[Parsed, str]:
        """Return the message of a completion, and the text of its reasoning with the tags."""
        if self._parse is gpt_oss:  # its messages have channels, with and without tools
            return self._parse(text, tools or ()), ""
        reasoning, rest = split_reasoning(text, opened)
        if tools and reasoning and not rest and "</think>" not in text:  # as in vLLM, a call ends the reasoning
            called = self._parse(reasoning, tools)
            if called.calls:
                return Parsed("", called.calls, called.content), called.content
        parsed = self._parse(rest, tools) if tools else Parsed(rest)
        return replace(parsed, reasoning=reasoning), text[: len(text) - len(rest)]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of N characters has at least N / longest_token tokens."""
        return max(map(len, self._backend.get_vocab()))

    def text_length(self, ids: list[int]) -> int:
        """Return the number of characters of tokens, without special tokens."""
        return len(self._backend.decode(ids, skip_special_tokens=True))

    def _comparable(self, text: str, opened: bool, tools: list[Any] | None) -> tuple[Any, ...]:
        """Return the message of a completion in a form that is equal for equal messages."""
        parsed, _ = self._read(text, opened, tools)
        calls = [(call.name, json.dumps(json.loads(call.arguments), sort_keys=True)) for call in parsed.calls]
        return parsed.reasoning and parsed.reasoning.strip(), parsed.content.strip(), calls

    def _text_after_message(self, messages: list[Message], index: int, tools: list[Any] | None, end: str) -> str | None:
        """Return the text from the end token of message `index`; None if the template writes no such token."""
        replaced = dict(messages[index], content=_PLACEHOLDER)
        replaced.pop("reasoning_content", None)
        if calls := replaced.get("tool_calls"):
            function = dict(calls[-1]["function"], arguments={_PLACEHOLDER: _PLACEHOLDER})
            replaced["tool_calls"] = [*calls[:-1], dict(calls[-1], function=function)]
        text = ""
        with suppress(ValueError):  # the template rejects the placeholder, so the text after it is unknown
            text = self._text([*messages[:index], replaced, *messages[index + 1 :]], tools)
        _, found, after = text.rpartition(_PLACEHOLDER)
        start = after.find(end)
        if not found or start < 0 or any(token in after[:start] for token in self._special.values()):
            return None
        return after[start:]

    @cached_property
    def _reads_text_arguments(self) -> bool:
        """Whether the template renders a tool call only with JSON text as arguments."""
        call = {"id": "call00000", "type": "function", "function": {"name": _PLACEHOLDER, "arguments": {"a": "b"}}}
        asked = {"role": "user", "content": "a"}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered = {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": _PLACEHOLDER[:4]}
        for form in (called, with_text_arguments(called)):
            with suppress(ValueError):
                if _PLACEHOLDER in self._apply([asked, form, answered], None):
                    return form is not called
        return False

    def _text(self, messages: list[Message], tools: list[Any] | None) -> str:
        if any("tool_calls" in message for message in messages) and self._reads_text_arguments:
            messages = list(map(with_text_arguments, messages))
        return self._apply(messages, tools)

    def _apply(self, messages: list[Message], tools: list[Any] | None) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._config.chat_template_args,
            )
        except (TemplateError, TypeError) as error:  # such as roles that do not alternate
            raise ValueError(f"the chat template rejects the messages: {summarize_exception(error)}") from None
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _is_call(sent: Mapping[str, Any], sampled: ToolCall) -> bool:
    given, own = sent["arguments"] or {}, json.loads(sampled.arguments)
    is_same = isinstance(given, dict) and all(
        name in given and is_same_json(given[name], value) for name, value in own.items()
    )
    return sent["name"] == sampled.name and is_same


def is_same_json(one: Any, other: Any) -> bool:
    """Return whether two decoded values are the same in JSON, where a number is no truth value: 1 is 1.0, not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same_json, one, other))
    return bool(one == other)


def read_template(file: Path | None) -> str | None:
    """Read `rendering.chat_template`; None uses the tokenizer's own. Raises ConfigError if it cannot be read."""
    try:
        return file.read_text() if file is not None else None
    except OSError as error:
        raise ConfigError(f"rendering.chat_template {file} cannot be read: {error.strerror}") from None


def _opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")
