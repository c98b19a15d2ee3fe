"""Renders examples to token sequences, and marks the tokens to learn.

The trained tokens are exactly those that the model would generate after the tokens of its prompt. The prompt is
rendered with the template's generation prompt and tokenised separately; the answer is the text that the template adds
with the assistant's message, including the token that ends the turn. For other roles the tokens of the content are
learned.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.data.example_schema import Dialogue, Message, RowError, read_example

_MARK = "\ue000\ue001\ue000"  # placeholder to locate a content; private-use characters

_SURROGATE = re.compile("[\ud800-\udfff]")

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RenderedSequence:
    """One sequence to train on."""

    tokens: NDArray[np.int64]  # int64 [T]
    loss_mask: NDArray[np.bool_]  # bool [T], the tokens to learn; never the first

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class _Draft:
    """A sequence under construction, turn by turn."""

    text: str = ""  # the text so far
    # separately tokenised texts, each with its learned spans
    pieces: list[tuple[str, list[Span]]] = field(default_factory=list)

    def add(self, text: str, learned: Sequence[Span] = ()) -> None:
        """Append a piece; `learned` are spans relative to the piece."""
        if text:
            self.text += text
            self.pieces.append((text, list(learned)))


def encode_example(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: SFTDataConfig
) -> list[RenderedSequence]:
    """Encode one example: a conversation, or prompt and completion as text or as messages.

    Messages may have `tools`, definitions in OpenAI's form, which are passed to the template. Of prompt and completion
    only the turns of the completion are trained on. Returns usually one sequence; none if no token is trained on. A
    template that renders an earlier turn differently when a later one follows (for example without its reasoning) gives
    one sequence per such turn.

    Raises:
        RowError: the example is invalid, or the template rejects it.
        ConfigError: an answer of the template does not continue its own generation prompt.
    """
    content = read_example(example, options)
    if isinstance(content, Dialogue):
        return _encode_chat(content, tokenizer, options)
    begin, end = ([] if one is None else [one] for one in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    prompt = begin + _tokenise(tokenizer, content.prompt)
    completion = _tokenise(tokenizer, content.completion) + end
    mask = [options.loss_mask.user] * len(prompt) + [options.loss_mask.assistant] * len(completion)
    return [_sequence(prompt + completion, mask)]


def _encode_chat(
    dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase, options: SFTDataConfig
) -> list[RenderedSequence]:
    """Iterate over the assistant's learned turns; other learned messages are marked in the prompt around them."""
    messages, tools = dialogue.messages, dialogue.tools
    learned = _learned(dialogue, options)
    turns = [i for i in learned if messages[i]["role"] == "assistant"]
    drafts: list[_Draft] = []
    previous = -1
    for i in [*turns, len(messages)]:
        others = [j for j in learned if previous < j < i]
        if i == len(messages) and not others:
            break
        end = i if i < len(messages) else others[-1] + 1
        with_prompt = i < len(messages)
        prompt = _render(tokenizer, messages[:end], tools, with_prompt)
        spans = [_find(tokenizer, messages[:end], j, tools, with_prompt, prompt) for j in others]
        if not drafts or not prompt.startswith(drafts[-1].text):
            drafts.append(_Draft())
        draft, done = drafts[-1], len(drafts[-1].text)
        draft.add(prompt[done:], [(begin - done, end - done) for begin, end in spans])
        if with_prompt:
            answer, after = _answer(tokenizer, messages[: i + 1], tools, prompt)
            draft.add(answer, [(0, len(answer))])
            draft.add(after)
        previous = i
    return [_finish(draft, tokenizer) for draft in drafts]


def _learned(dialogue: Dialogue, options: SFTDataConfig) -> list[int]:
    """Return the indices of the messages to learn, ascending."""
    mask = options.loss_mask
    roles = {"system": mask.system, "developer": mask.system, "user": mask.user, "tool": mask.tool}
    assistant = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    chosen = set(assistant if options.assistant_turns == "all" else assistant[-1:]) if mask.assistant else set[int]()
    chosen |= {i for i, message in enumerate(dialogue.messages) if roles.get(message["role"])}
    return sorted(i for i in chosen if i >= dialogue.first)


def _answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any, prompt: str
) -> tuple[str, str]:
    """Return the text that the last message adds to its prompt, and the white space after the generated text."""
    whole = _render(tokenizer, messages, tools)
    if not whole.startswith(prompt):
        raise ConfigError(
            "tokenizer.name: the chat template does not continue its own generation prompt with the assistant's "
            "message, so the trained tokens are ambiguous; use another template"
        )
    answer = whole[len(prompt) :]
    bare = answer.rstrip()
    return (bare, answer[len(bare) :]) if bare.endswith(_specials(tokenizer)) else (answer, "")


def _find(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], j: int, tools: Any, with_prompt: bool, text: str
) -> Span:
    """Return the span of message `j`'s content in `text`, including an end-of-turn token that follows it directly."""
    content = messages[j].get("content")
    if not isinstance(content, str):
        raise RowError(
            f"message {j} has role {messages[j]['role']!r}, which is trained on, but its content is not text"
        )
    marked = [*messages[:j], {**messages[j], "content": _MARK}, *messages[j + 1 :]]
    before, found, after = _render(tokenizer, marked, tools, with_prompt).partition(_MARK)
    around = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    if not found or _MARK in after or not around:
        raise ConfigError(
            f"tokenizer.name: the chat template does not show the content of a {messages[j]['role']} message once and "
            "unchanged, so it cannot be trained on; remove it from data.loss_mask"
        )
    end = len(text) - len(after)
    ending = next((special for special in _specials(tokenizer) if after.startswith(special)), "")
    return len(before), end + len(ending)


def _finish(draft: _Draft, tokenizer: PreTrainedTokenizerBase) -> RenderedSequence:
    tokens, mask = list[int](), list[bool]()
    for text, spans in draft.pieces:
        if spans in ([], [(0, len(text))]):
            ids, learned = _tokenise(tokenizer, text), bool(spans)
            tokens, mask = tokens + ids, mask + [learned] * len(ids)
            continue
        if not tokenizer.is_fast:
            raise ConfigError("data.loss_mask: system, user and tool messages need a fast tokenizer")
        encoding = _encoding(tokenizer, text, return_offsets_mapping=True)
        tokens += encoding["input_ids"]
        mask += [any(a <= begin and end <= b for a, b in spans) for begin, end in encoding["offset_mapping"]]
    return _sequence(tokens, mask)


def _sequence(tokens: list[int], mask: list[bool]) -> RenderedSequence:
    learned = np.array(mask, np.bool_)
    learned[:1] = False  # the first token has no context
    return RenderedSequence(np.array(tokens, np.int64), learned)


def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError("tokenizer.name: the tokenizer has no chat template; use prompt and completion as text")
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "tools": tools}
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except (TemplateError, TypeError, ValueError) as error:  # a template that adds None to text, or invalid tools
        if isinstance(error, TemplateSyntaxError):
            raise ConfigError(f"tokenizer.name: the chat template is invalid: {error}") from None
        raise RowError(f"the chat template rejects the messages: {' '.join(str(error).split())}") from None


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return _encoding(tokenizer, text)["input_ids"] if text else []


def _encoding(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> BatchEncoding:
    if _SURROGATE.search(text):
        raise RowError("its text contains half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return tokenizer(text, add_special_tokens=False, **options)
