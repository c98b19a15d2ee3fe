"""From one example to token sequences with the exact tokens that the model is to learn.

Exact means: learned is what the model would have to generate, after the very tokens that it would be prompted with.
So the prompt is rendered with the template's generation prompt and tokenised by itself, and the answer is what the
template adds when the assistant's message is there, up to and including the token that ends the turn. Of the other
roles, whose turns nobody prompts for, learned are the tokens of the content inside the prompt as it is tokenised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from prime_rl.configs.sft_data import SFTDataConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.sft.examples import Dialogue, Message, RowError, Text, read_example

_MARK = "\ue000\ue001\ue000"  # stands in for a content to see where it goes; private characters, in no text

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence to train on.

    Attributes:
        tokens: int64 [T].
        loss_mask: bool [T], the tokens to learn; never the first.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> "TokenSequence":
        """Keep the first `length` tokens."""
        return TokenSequence(self.tokens[:length], self.loss_mask[:length])


@dataclass(slots=True)
class _Draft:
    """A sequence that grows turn by turn.

    Attributes:
        text: what it stands for.
        pieces: what is tokenised by itself, each with the stretches of it that are learned.
    """

    text: str = ""
    pieces: list[tuple[str, list[Span]]] = field(default_factory=list)

    def add(self, text: str, learned: Sequence[Span] = ()) -> None:
        """Append a piece; `learned` counts from the beginning of the piece."""
        if text:
            self.text += text
            self.pieces.append((text, list(learned)))


def encode_example(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: SFTDataConfig
) -> list[TokenSequence]:
    """Encode one example: a conversation, or prompt and completion as text or as messages.

    Messages may come with `tools`, definitions in OpenAI's form, which the template shows to the model.

    Returns:
        Usually one sequence. A template that renders an earlier turn differently once a later one follows (reasoning
        stripped from history) gives one per such turn, as the model would meet it. Of prompt and completion only the
        completion's turns are learned. Empty where there is nothing to learn.

    Raises:
        RowError: the example is not what it should be, or the template refuses it.
        ConfigError: a template whose answers do not continue its own generation prompt.
    """
    content = read_example(example, options)
    if isinstance(content, Text):
        return [_encode_text(content, tokenizer, options)]
    return _encode_chat(content, tokenizer, options)


def _encode_text(text: Text, tokenizer: PreTrainedTokenizerBase, options: SFTDataConfig) -> TokenSequence:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    prompt = begin + _tokenise(tokenizer, text.prompt)
    completion = _tokenise(tokenizer, text.completion) + end
    mask = [options.loss_mask.user] * len(prompt) + [options.loss_mask.assistant] * len(completion)
    return _sequence(prompt + completion, mask)


def _encode_chat(dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase, options: SFTDataConfig) -> list[TokenSequence]:
    """Walk through the assistant's learned turns; other learned messages are marked in the prompt they stand in."""
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
        asks = i < len(messages)
        prompt = _render(tokenizer, messages[:end], tools, asks)
        spans = [_find(tokenizer, messages[:end], j, tools, asks, prompt) for j in others]
        if not drafts or not prompt.startswith(drafts[-1].text):
            drafts.append(_Draft())
        draft, done = drafts[-1], len(drafts[-1].text)
        draft.add(prompt[done:], [(begin - done, end - done) for begin, end in spans])
        if asks:
            answer, after = _answer(tokenizer, messages[: i + 1], tools, prompt)
            draft.add(answer, [(0, len(answer))])
            draft.add(after)
        previous = i
    return [_finish(draft, tokenizer) for draft in drafts]


def _learned(dialogue: Dialogue, options: SFTDataConfig) -> list[int]:
    """Indices of the messages to learn, ascending."""
    mask = options.loss_mask
    roles = {"system": mask.system, "developer": mask.system, "user": mask.user, "tool": mask.tool}
    assistant = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    chosen = set(assistant if options.assistant_turns == "all" else assistant[-1:]) if mask.assistant else set[int]()
    chosen |= {i for i, message in enumerate(dialogue.messages) if roles.get(message["role"])}
    return sorted(i for i in chosen if i >= dialogue.first)


def _answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any, prompt: str
) -> tuple[str, str]:
    """What the last message, the assistant's, adds to its prompt: what is generated, and white space after it."""
    whole = _render(tokenizer, messages, tools)
    if not whole.startswith(prompt):
        raise ConfigError(
            "tokenizer.name: the chat template does not continue its own generation prompt with the assistant's "
            "message, so the learned tokens cannot be told exactly; use another template"
        )
    answer = whole[len(prompt) :]
    bare = answer.rstrip()
    return (bare, answer[len(bare) :]) if bare.endswith(_specials(tokenizer)) else (answer, "")


def _find(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], j: int, tools: Any, asks: bool, text: str
) -> Span:
    """Where the content of message `j` stands in `text`, with the token that ends the turn if that follows directly."""
    content = messages[j].get("content")
    if not isinstance(content, str):
        raise RowError(f"message {j} has role {messages[j]['role']!r}, which is to be learned, but no text as content")
    marked = [*messages[:j], {**messages[j], "content": _MARK}, *messages[j + 1 :]]
    before, found, after = _render(tokenizer, marked, tools, asks).partition(_MARK)
    around = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    if not found or _MARK in after or not around:
        raise ConfigError(
            f"tokenizer.name: the chat template does not show the content of a {messages[j]['role']} message once and "
            "unchanged, so it cannot be learned; leave it out of data.loss_mask"
        )
    end = len(text) - len(after)
    ending = next((special for special in _specials(tokenizer) if after.startswith(special)), "")
    return len(before), end + len(ending)


def _finish(draft: _Draft, tokenizer: PreTrainedTokenizerBase) -> TokenSequence:
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


def _sequence(tokens: list[int], mask: list[bool]) -> TokenSequence:
    learned = np.array(mask, np.bool_)
    learned[:1] = False  # nothing precedes it
    return TokenSequence(np.array(tokens, np.int64), learned)


def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError("tokenizer.name: the tokenizer has no chat template; use prompt and completion as text")
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "tools": tools}
    try:
        return cast(str, tokenizer.apply_chat_template(list(messages), **options))
    except TemplateSyntaxError as error:
        raise ConfigError(f"tokenizer.name: the chat template is no template: {error}") from None
    except (TemplateError, TypeError, ValueError) as error:  # a template that adds None to text; tools that are none
        raise RowError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from None


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return cast(list[int], _encoding(tokenizer, text)["input_ids"]) if text else []


def _encoding(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> BatchEncoding:
    try:
        return tokenizer(text, add_special_tokens=False, **options)
    except (TypeError, UnicodeEncodeError):
        if not any("\ud800" <= character <= "\udfff" for character in text):
            raise
        raise RowError("its text has half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
