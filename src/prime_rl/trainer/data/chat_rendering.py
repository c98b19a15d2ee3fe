"""Renders examples to token sequences, and marks the tokens to learn.

The tokens are those of the whole text, and the trained ones those that the model would generate after its prompt: the
prompt is rendered with the template's generation prompt; the answer is the text that the template adds with the
assistant's message, and ends with the token that ends the turn. Where a token would cross the border of the two, they
are tokenised separately. For other roles the tokens of the content are learned.

What a template renders is compared with the message: an answer whose content or tool calls are missing is refused,
another difference is logged once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from loguru import logger
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from prime_rl.configs.training.sft_data import SFTDataConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.rendering.conversations import Conversation, PromptCompletion, RowError, TrackedRow, read_row
from prime_rl.rollouts.rendering.messages import Message, with_text_arguments

_MARK = "\ue000\ue001\ue000"  # placeholder to locate a content; private-use characters
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_THINKING = re.compile(r"</?think>")
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
    """A sequence under construction, turn by turn: its text, the learned spans, and where prompts end."""

    text: str = ""
    learned: list[Span] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)

    def add(self, text: str, learned: Sequence[Span] = ()) -> None:
        """Append a piece that is separated from the last one; `learned` are spans relative to it."""
        start = len(self.text)
        self.borders += [start] if start and text else []
        self.learned += [(start + begin, start + end) for begin, end in learned]
        self.text += text


class ExampleEncoder:
    """Encodes examples with a tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: SFTDataConfig,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`template_args` are further variables of the chat template."""
        self._tokenizer, self._options, self._template_args = tokenizer, options, template_args
        self._specials = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._special_text = re.compile("|".join(map(re.escape, self._specials)) or "(?!)")
        self._special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._trailer: str | None = None
        self._reads_text_arguments = False
        self._logged, self._compared_tools = set[str](), False

    def encode(self, row: Mapping[str, Any], where: str = "the row") -> list[RenderedSequence]:
        """Encode one example: a conversation, or prompt and completion as text or as messages.

        Of prompt and completion only the turns of the completion are trained on. Returns usually one sequence; none if
        no token is trained on. A template that renders an earlier turn differently when a later one follows (for
        example without its reasoning) gives one sequence per such turn.

        Args:
            row: the columns.
            where: its location, for warnings.

        Raises:
            RowError: the example is invalid, or the template does not render it.
            ConfigError: there is no chat template, or it is invalid.
        """
        row = TrackedRow(row)
        content = read_row(row, self._options)
        if unread := row.unread():
            read = ", ".join(str(name) for name in row if name not in unread)
            self._log_once(
                "columns", f"{where}: columns that are not read: {', '.join(unread)}; read are {read}", "INFO"
            )
        if isinstance(content, Conversation):
            return self._encode_conversation(content, where)
        if not content.completion and self._options.loss_mask.assistant:
            self._report_empty(f"{where}: the completion")
        return [self._encode_text(content)]

    def _encode_text(self, content: PromptCompletion) -> RenderedSequence:
        """Encode the joined text with the special tokens that the tokenizer adds itself, and an end."""
        prefix, suffix = _added_tokens(self._tokenizer)
        end = suffix or [one for one in (self._tokenizer.eos_token_id,) if one is not None]
        draft, mask = _Draft(), self._options.loss_mask
        for text, is_learned in ((content.prompt, mask.user), (content.completion, mask.assistant)):
            draft.add(text, [(0, len(text))] if is_learned else [])
        tokens, learned = self._tokens_of(draft)
        end = [] if tokens[-len(end) :] == end else end
        return _sequence([*prefix, *tokens, *end], [mask.user] * len(prefix) + learned + [mask.assistant] * len(end))

    def _encode_conversation(self, chat: Conversation, where: str) -> list[RenderedSequence]:
        """Encode in the form of tool calls that the template reads: objects, or JSON text and no content (DeepSeek)."""
        if self._mentions("tool_response"):
            chat = replace(chat, messages=list(map(_unwrap_response, chat.messages)))
        if self._mentions("thinking") and not self._mentions("reasoning_content"):  # gpt-oss
            chat = replace(chat, messages=list(map(_with_thinking, chat.messages)))
        forms = [chat]
        if any(message.get("tool_calls") for message in chat.messages):
            forms.append(replace(chat, messages=list(map(with_text_arguments, chat.messages))))
        errors = list[RowError]()
        for form in reversed(forms) if self._reads_text_arguments else forms:
            try:
                sequences = self._encode_chat(form, where)
            except RowError as error:
                errors.append(error)
                continue
            self._reads_text_arguments = form is not chat if len(forms) > 1 else self._reads_text_arguments
            self._report_unread(form, where)
            if not sequences:
                self._log_once("nothing", f"{where} has no trained token, and is skipped, as all such examples are")
            return sequences
        raise min(errors, key=lambda error: "rejects the messages" in str(error))  # the other form may be rejected

    def _encode_chat(self, chat: Conversation, where: str) -> list[RenderedSequence]:
        """Iterate over the assistant's learned turns; other learned messages are marked in the prompt around them."""
        messages, learned = chat.messages, self._learned(chat, where)
        turns = [i for i in learned if messages[i]["role"] == "assistant"]
        drafts: list[_Draft] = []
        previous = -1
        for i in [*turns, len(messages)]:
            others = [j for j in learned if previous < j < i]
            if i == len(messages) and not others:
                break
            end = i if i < len(messages) else others[-1] + 1
            with_prompt = i < len(messages)
            prompt = self._render(chat, messages[:end], with_prompt)
            spans = [self._find(chat, end, j, with_prompt, prompt) for j in others]
            if not drafts or not prompt.startswith(drafts[-1].text):
                drafts.append(_Draft())
            draft, done = drafts[-1], len(drafts[-1].text)
            draft.add(prompt[done:], [(begin - done, end - done) for begin, end in spans])
            if with_prompt:
                answer, after = self._answer(chat, i, prompt, where)
                draft.add(answer, [(0, len(answer))])
                draft.add(after)
            previous = i
        return [_sequence(*self._tokens_of(draft)) for draft in drafts]

    def _learned(self, chat: Conversation, where: str) -> list[int]:
        """Return the indices of the messages to learn, ascending."""
        mask, roles = self._options.loss_mask, [message["role"] for message in chat.messages]
        is_selected = {"system": mask.system, "developer": mask.system, "user": mask.user, "tool": mask.tool}
        assistant = [i for i, role in enumerate(roles) if role == "assistant" and mask.assistant]
        chosen = {*(assistant if self._options.assistant_turns == "all" else assistant[-1:])}
        chosen |= {i for i, role in enumerate(roles) if is_selected.get(role)}
        if 0 in chosen and roles[0] == "assistant":
            chosen.remove(0)
            self._log_once("first", f"{where}: a first message of the assistant has no prompt, and is not trained on")
        for i in sorted(chat.included - chosen):
            self._log_once(
                f"included {roles[i]}",
                f"{where}: message {i} of role {roles[i]} has a weight or loss_mask of 1, but data.loss_mask and "
                "data.assistant_turns do not select it",
            )
        return sorted(i for i in chosen - chat.excluded if i >= chat.first)

    def _answer(self, chat: Conversation, i: int, prompt: str, where: str) -> tuple[str, str]:
        """Return the text that message `i` adds to its prompt, with the end of the turn, and the white space after."""
        whole = self._render(chat, chat.messages[: i + 1])
        start = len(prompt) if whole.startswith(prompt) else self._find_answer(chat, i, prompt, whole)
        if start is None:
            raise RowError(
                f"the chat template does not continue its own generation prompt with message {i}, so the trained "
                "tokens are ambiguous; set rendering.chat_template or rendering.chat_template_args, or remove the row"
            )
        trailer = self._find_trailer(chat, i, start, whole)
        answer = whole[start:].removesuffix(trailer)
        self._compare(chat, i, answer, where)
        bare = answer.rstrip()
        if bare.endswith(self._specials):
            return bare, answer[len(bare) :] + (trailer if i == len(chat.messages) - 1 else "")
        if marker := self._next_marker(chat, i, whole):
            return answer + marker, ""
        self._log_once(
            "end",
            f"{where}: the chat template ends the assistant's turn without a special token, so the model does not "
            "learn to stop; set rendering.chat_template to a template that writes one",
        )
        return answer, ""

    def _find_answer(self, chat: Conversation, i: int, prompt: str, whole: str) -> int | None:
        """Return where message `i` begins if the template writes its prompt differently once it is answered.

        Templates of Mistral leave the system message out then. The header of the turn must be that of the prompt.
        """
        with suppress(RowError):
            before, found, _ = self._render(
                chat, [*chat.messages[:i], {"role": "assistant", "content": _MARK}]
            ).partition(_MARK)
            header = before.rstrip()
            special = next((one for one in self._specials if header.endswith(one)), None)
            if found and special and prompt.rstrip().endswith(special) and whole.startswith(header):
                return len(header)
        return None

    def _find_trailer(self, chat: Conversation, i: int, start: int, whole: str) -> str:
        """Return the special token that the template writes once, after the last turn (newer templates of Phi-3)."""
        if self._trailer is None:
            with suppress(RowError):
                longer = self._render(chat, [*chat.messages[: i + 1], _probe(chat.messages[i])])
                pairs = enumerate(zip(whole, longer, strict=False))
                common = next((n for n, (a, b) in pairs if a != b), min(len(whole), len(longer)))
                ends = [match.end() for match in self._special_text.finditer(whole) if start < match.end() <= common]
                end = len(whole) if common == len(whole) else max(ends, default=start)
                # Behind the content, and nothing else: gpt-oss ends the last turn with another token than earlier ones.
                is_end = (chat.messages[i]["content"] or _MARK).strip() in whole[start:end]
                if end == len(whole) or (is_end and not self._special_text.sub("", whole[end:]).strip()):
                    self._trailer = whole[end:]
        return self._trailer or ""

    def _next_marker(self, chat: Conversation, i: int, whole: str) -> str:
        """Return the special token that begins the next turn, for templates whose turns end with it (GLM)."""
        following = chat.messages[i + 1 : i + 2] or [_probe(chat.messages[i])]
        with suppress(RowError):
            after = self._render(chat, [*chat.messages[: i + 1], *following])
            if not after.startswith(whole):  # it drops the reasoning of earlier turns
                before = [*chat.messages[:i], {"role": "assistant", "content": _MARK}]
                whole, after = self._render(chat, before), self._render(chat, [*before, *following])
            if after.startswith(whole):
                return next((special for special in self._specials if after.startswith(special, len(whole))), "")
        return ""

    def _compare(self, chat: Conversation, i: int, answer: str, where: str) -> None:
        """Compare the rendered answer with the message. Raises RowError if the content or the calls are missing."""
        message = chat.messages[i]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        parts = {
            "content": [part.strip() for part in _THINKING.split(message["content"] or "")],
            "reasoning_content": [str(message.get("reasoning_content", "")).strip()],
            "tool_calls": [call["name"] for call in calls],
            "arguments of tool_calls": [text for call in calls for text in _texts_of(call["arguments"])],
        }
        if not any(text for texts in parts.values() for text in texts):
            self._report_empty(f"{where}: message {i}")
        for name, expected in parts.items():
            shown = [_is_shown(part, answer) for part in expected if part]
            if shown and not any(shown) and (name == "tool_calls" or (name == "content" and not calls)):
                raise RowError(
                    f"the chat template does not render the {name} of message {i}, so it cannot be trained on; set "
                    "rendering.chat_template to a template that does"
                )
            if not all(shown) or (name == "tool_calls" and any(answer.count(n) < expected.count(n) for n in expected)):
                self._log_once(
                    name,
                    f"{where}: the chat template does not render the {name} of message {i} completely, or changes it",
                )

    def _report_unread(self, chat: Conversation, where: str) -> None:
        """Warn of what the chat template does not read: unknown roles, keys, and tools; and of special tokens."""
        for i, message in enumerate(chat.messages):
            if found := self._special_text.search(message["content"] or ""):
                self._log_once("special", f"{where}: message {i} contains {found[0]!r}, which becomes a special token")
        for role in {message["role"] for message in chat.messages} - _ROLES:
            self._log_once(f"role {role}", f"{where}: messages of role {role!r} are not trained on")
        for key in chat.other_keys:
            if not self._mentions(key):
                self._log_once(f"key {key}", f"{where}: the key {key!r} of messages is not read")
        if chat.tools and not self._compared_tools:
            self._compared_tools = True
            with suppress(RowError):  # messages after the last trained one may not be rendered otherwise
                if self._render(chat, chat.messages) == self._render(replace(chat, tools=None), chat.messages):
                    self._log_once("tools", f"{where}: the chat template does not render the definitions of `tools`")

    def _report_empty(self, what: str) -> None:
        self._log_once("empty", f"{what} is empty, so only its end is trained on, as in all such examples")

    def _mentions(self, key: str) -> bool:
        """Whether the text of the chat template contains a name."""
        template = self._tokenizer.chat_template
        text = template if isinstance(template, str) else " ".join((template or {}).values())
        return re.search(rf"[.'\"<]{re.escape(key)}\b", text) is not None

    def _find(self, chat: Conversation, end: int, j: int, with_prompt: bool, text: str) -> Span:
        """Return the span of message `j`'s content in `text`, including an end-of-turn token that follows directly."""
        messages = chat.messages
        marked = [*messages[:j], {**messages[j], "content": _MARK}, *messages[j + 1 : end]]
        before, found, after = self._render(chat, marked, with_prompt).partition(_MARK)
        around = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
        if not found or _MARK in after or not around:
            raise RowError(
                f"the chat template does not show the content of message {j} of role {messages[j]['role']} once and "
                "unchanged, so it cannot be trained on; remove the role from data.loss_mask"
            )
        ending = next((special for special in self._specials if after.startswith(special)), "")
        return len(before), len(text) - len(after) + len(ending)

    def _render(self, chat: Conversation, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                "tokenizer.name: the tokenizer has no chat template; set rendering.chat_template, or use prompt and "
                "completion as text"
            )
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=chat.tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **{**self._template_args, **chat.template_args},
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"tokenizer.name: the chat template is invalid: {error}") from None
        except (TemplateError, TypeError, ValueError) as error:  # a template that adds None to text, or invalid tools
            raise RowError(f"the chat template rejects the messages: {' '.join(str(error).split())}") from None

    def _tokens_of(self, draft: _Draft) -> tuple[list[int], list[bool]]:
        """Return the token ids of a draft, and which are learned.

        The text is tokenised as a whole. If a token would cross a border, where the prompt of sampling ends, the pieces
        are tokenised separately, unless their text would then differ (a tokenizer that begins each text with a space).
        """
        pieces = [draft.text[a:b] for a, b in pairwise([0, *draft.borders, len(draft.text)])]
        if not self._tokenizer.is_fast:
            return self._tokens_of_pieces(draft, pieces)
        whole = self._encoding(draft.text, return_offsets_mapping=True)
        ids, offsets = whole["input_ids"], self._offsets(whole, draft.text)
        begins, ends = offsets.T
        crossed = {c for c in draft.borders if c not in begins or c not in ends or ((begins < c) & (c < ends)).any()}
        learned = draft.learned
        if crossed:
            encodings = [self._encoding(piece, return_offsets_mapping=True) for piece in pieces]
            separate = [one for encoding in encodings for one in encoding["input_ids"]]
            if self._decode(separate) == self._decode(ids):
                shifts = np.repeat([0, *draft.borders], [len(encoding["input_ids"]) for encoding in encodings])
                parts = [self._offsets(encoding, piece) for encoding, piece in zip(encodings, pieces, strict=True)]
                ids, offsets = separate, np.concatenate(parts) + shifts[:, None]
            else:  # the token that crosses the border is learned
                starts = {c: int(begins[(begins < c) & (c < ends)].min(initial=c)) for c in crossed}
                learned = [(starts.get(begin, begin), end) for begin, end in learned]
        is_learned = np.zeros(len(draft.text) + 1, np.bool_)
        for begin, end in learned:
            is_learned[begin:end] = True
        counts = np.concatenate([[0], np.cumsum(is_learned)])
        begins, ends = offsets.T
        return ids, ((counts[ends] - counts[begins] == ends - begins) & is_learned[begins]).tolist()

    def _offsets(self, encoding: BatchEncoding, text: str) -> NDArray[np.int64]:
        """Return begin and end of each token in the text [T, 2], white space included.

        Some tokenizers omit the space of a token, and special tokens may include the white space beside them.
        """
        offsets, previous = list[Span](), 0
        for one, (begin, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            if one in self._special_ids:
                piece = text[begin:end]
                start = begin + len(piece) - len(piece.lstrip())
                offsets.append((start, start + len(piece.strip())))
            else:
                offsets.append((previous if text[previous:begin].isspace() else begin, end))
            previous = max(previous, end)
        return np.array(offsets, np.int64).reshape(-1, 2)

    def _tokens_of_pieces(self, draft: _Draft, pieces: Sequence[str]) -> tuple[list[int], list[bool]]:
        """Tokenise pieces separately, without offsets.

        Raises ConfigError if one is learned partly, or if the tokenizer adds to the text where a piece begins.
        """
        ids, mask = list[int](), list[bool]()
        for start, piece in zip([0, *draft.borders], pieces, strict=True):
            spans = [(max(a, start), min(b, start + len(piece))) for a, b in draft.learned]
            spans = [(a, b) for a, b in spans if a < b]
            if spans not in ([], [(start, start + len(piece))]):
                raise ConfigError("data.loss_mask: system, user and tool messages need a fast tokenizer")
            tokens = self._encoding(piece)["input_ids"] if piece else []
            ids, mask = ids + tokens, mask + [bool(spans)] * len(tokens)
        whole = self._decode(self._encoding(draft.text)["input_ids"])
        if (joined := self._decode(ids)) != whole:
            at = next((n for n, (a, b) in enumerate(zip(joined, whole, strict=False)) if a != b), 0)
            before, after = (text[max(at - 9, 0) : at + 9] for text in (whole, joined))
            raise ConfigError(
                f"tokenizer.name: prompt and answer are tokenised separately, which changes {before!r} to {after!r}; "
                "it needs a fast tokenizer"
            )
        return ids, mask

    def _encoding(self, text: str, **options: Any) -> BatchEncoding:
        if _SURROGATE.search(text):
            raise RowError("its text contains half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
        return self._tokenizer(text, add_special_tokens=False, **options)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _log_once(self, kind: str, text: str, level: str = "WARNING") -> None:
        if kind not in self._logged:
            logger.log(level, "{}", text)
        self._logged.add(kind)


def show_sequence(sequence: RenderedSequence, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a sequence with « » around what is learned."""
    edges = np.flatnonzero(np.diff(sequence.loss_mask, prepend=False, append=False))
    shown, position = list[str](), 0
    for begin, end in edges.reshape(-1, 2):
        shown += [
            tokenizer.decode(sequence.tokens[position:begin]),
            "«",
            tokenizer.decode(sequence.tokens[begin:end]),
            "»",
        ]
        position = end
    return "".join([*shown, tokenizer.decode(sequence.tokens[position:])])


def _sequence(tokens: list[int], mask: list[bool]) -> RenderedSequence:
    learned = np.array(mask, np.bool_)
    learned[:1] = False  # the first token has no context
    return RenderedSequence(np.array(tokens, np.int64), learned)


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text, as a server does."""
    whole, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def _probe(message: Message) -> Message:
    """Return a message that can follow one of the assistant."""
    return {"role": "tool" if message.get("tool_calls") else "user", "content": _MARK}


def _unwrap_response(message: Message) -> Message:
    """Remove the tags that Hermes' data have around the result of a tool, because the template adds them."""
    text, (begin, end) = message["content"].strip(), ("<tool_response>", "</tool_response>")
    if message["role"] != "tool" or not (text.startswith(begin) and text.endswith(end) and text.count(begin) == 1):
        return message
    return {**message, "content": text[len(begin) : -len(end)].strip()}


def _with_thinking(message: Message) -> Message:
    """Add the name that gpt-oss' template has for reasoning."""
    return {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message


def _is_shown(value: str, text: str) -> bool:
    """Whether `text` contains `value` as it is or as JSON."""
    return any(form in text for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]))


def _texts_of(value: Any) -> list[str]:
    """Return the texts inside an object."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _texts_of(one)]
