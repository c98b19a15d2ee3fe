"""Reads examples from local files, renders them to token sequences, and marks the tokens to learn.

The trained tokens are exactly those that the model would generate after the tokens of its prompt. The prompt is
rendered with the template's generation prompt and tokenised separately; the answer is the text that the template adds
with the assistant's message, including the token that ends the turn. For other roles the tokens of the content are
learned.

Rows are read one by one, each with its location for error messages.
"""

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from loguru import logger
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from prime_rl.configs.training.sft_data import SFTDataConfig, is_local
from prime_rl.core.errors import ConfigError, translate_error

Message = Mapping[str, Any]
LocatedRow = tuple[str, Mapping[str, Any]]
"""Location (`words.jsonl:17`) and columns."""
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_NUM_CHECKED = 1000
_COMPLETION: list[Message] = [{"role": "user"}, {"role": "assistant"}]  # of text data
_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_MARK = "\ue000\ue001\ue000"  # placeholder to locate a content; private-use characters
_SURROGATE = re.compile("[\ud800-\udfff]")
Span = tuple[int, int]


class RowError(Exception):
    """A row is invalid. The caller adds the location of the row to the message."""


class Dialogue(NamedTuple):
    """A conversation."""

    messages: list[Message]  # in OpenAI's form
    first: int  # index of the first message that may be trained on; earlier messages are the prompt
    tools: Any  # definitions for the template, if any


class PromptCompletion(NamedTuple):
    """A prompt and a completion without roles."""

    prompt: str
    completion: str


def read_example(example: Mapping[str, Any], options: SFTDataConfig) -> Dialogue | PromptCompletion:
    """Read the content of a row. Raises RowError if columns are missing, or contain no text or messages."""
    tools = example.get("tools") or None
    column = options.messages_column or ("messages" if options.prompt_column is None else None)
    if column is not None and (options.messages_column or column in example):
        return Dialogue(_messages(_value(example, column), column), 0, tools)
    prompt_column, completion_column = _columns(example, options)
    prompt, completion = _value(example, prompt_column), _value(example, completion_column)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not options.as_messages:
            return PromptCompletion(prompt, completion)
        pair: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return Dialogue(pair, 0, tools)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, prompt_column)
        return Dialogue([*before, *_messages(completion, completion_column)], len(before), tools)
    raise RowError(
        f"{prompt_column} and {completion_column} must both be text or both lists of messages, not "
        f"{_kind(prompt)} and {_kind(completion)}"
    )


def _columns(example: Mapping[str, Any], options: SFTDataConfig) -> tuple[str, str]:
    if options.prompt_column is not None and options.completion_column is not None:
        return options.prompt_column, options.completion_column
    for pair in (("prompt", "completion"), ("question", "answer")):
        if all(column in example for column in pair):
            return pair
    raise RowError(
        f"the columns are {sorted(map(str, example))}; required are `messages`, or `prompt` and `completion` (both "
        "text or both lists of messages); or set data.prompt_column and data.completion_column"
    )


def _value(example: Mapping[str, Any], column: str) -> Any:
    if column not in example:
        raise RowError(f"there is no column {column!r}, only {sorted(map(str, example))}")
    return example[column]


def _messages(value: Any, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{column} must be a list of messages, not {_kind(value)}")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(f"{column}[{i}] must have a `role` and a `content`, but is {str(message)[:80]!r}")
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise RowError(f"{column}[{i}].content must be text, not {_kind(content)}")
    # Tables fill missing keys of a message with None, which a template would treat as present.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _kind(value: Any) -> str:
    if value is None or value == []:
        return "nothing" if value is None else "an empty list"
    name = type(value).__name__
    return {"str": "text", "list": "a list"}.get(name, name)


def find_files(name: str, subset: str | None, split: str) -> list[Path]:
    """List the files of a file or folder `name` in order.

    `subset` is a file (without its suffix) or folder inside; None takes all. If the names in a folder contain splits
    (`train-00001.parquet`), those of `split` are selected. Raises ConfigError if there is none.
    """
    root = Path(name).expanduser()
    if not root.exists():
        raise ConfigError(f"data.name: {name} does not exist")
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ConfigError(f"data.name: {name} has none of the suffixes {', '.join(SUFFIXES)}")
        if subset is not None:
            raise ConfigError(f"data.subsets: {name} is a file, which has no subsets; set data.name to its folder")
        if split != "train":
            logger.warning(f"data.split = {split!r} has no effect: {name} is a file and is read completely")
        return [root]
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if subset is not None:
        names = {path: path.relative_to(root).with_suffix("").as_posix() for path in found}
        inside = [path for path in found if subset in (names[path], names[path].split("/")[0])]
        if not inside:
            raise ConfigError(f"data.subsets: {name} contains no {subset}; it has {_shown(iter(names.values()))}")
        found = inside
    if not found:
        raise ConfigError(f"data.name: {name} contains no file with a suffix of {', '.join(SUFFIXES)}")
    return _of_split(found, name, split)


def check_files(config: SFTDataConfig) -> None:
    """Read the first rows of local data sets, before torch is imported, which takes seconds.

    Raises:
        ConfigError: one is missing or empty, a row is invalid, or none has a message of a role that is trained on.
    """
    for name, subset, split in config.sets if all(map(is_local, config.name)) else ():
        rows = list(islice((row for file in find_files(name, subset, split) for row in read_rows(file)), _NUM_CHECKED))
        if not rows:
            raise ConfigError(f"data.name: {name} is empty")
        examples = [locate_errors(row, lambda columns: read_example(columns, config)) for row in rows]
        roles = {
            message["role"]
            for example in examples
            for message in (example.messages[example.first :] if isinstance(example, Dialogue) else _COMPLETION)
        }
        trained = [role for role, is_trained in config.loss_mask if is_trained]
        if len(rows) < _NUM_CHECKED and not roles & {*trained}:
            raise ConfigError(
                f"data.name: {name} has no message to train on: its roles are {', '.join(sorted(roles))}, and "
                f"data.loss_mask selects {', '.join(trained)}"
            )


def locate_errors(row: LocatedRow, use: Callable[[Any], Any]) -> Any:
    """Return `use(columns)` of a row; raise ConfigError with its location for a RowError."""
    where, columns = row
    with translate_error(RowError, lambda error: ConfigError(f"data.name: {where}: {error}")):
        return use(columns)


def read_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a file. Raises ConfigError with the line if they cannot be read or do not match the suffix."""
    with _name_location(lambda: str(path), path.suffix[1:]):
        yield from {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[path.suffix](path)


def _jsonl(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _object(where, _parse_json(where, line))


def _json(path: Path) -> Iterator[LocatedRow]:
    """Read an array of objects, or JSON lines, which many files with this suffix contain."""
    with path.open("rb") as file:
        if file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
            yield from _jsonl(path)
            return
    for number, row in enumerate(_parse_json(str(path), path.read_bytes()), 1):
        yield f"{path}, entry {number}", _object(f"entry {number} of {path}", row)


def _csv(path: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(sys.maxsize)  # the default limit of a cell is 128 KiB
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)  # reject unclosed quotes
        with _name_location(lambda: f"{path}:{reader.line_num + 1}", "CSV"):
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"data.name: {path}:{reader.line_num} does not have one cell per column")
                yield f"{path}:{reader.line_num}", row


def _parquet(path: Path) -> Iterator[LocatedRow]:
    with pyarrow.parquet.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", row


def _parse_json(where: str, text: bytes) -> Any:
    with _name_location(lambda: where, "JSON"):
        return json.loads(text)


def _name_location(where: Callable[[], str], kind: str) -> AbstractContextManager[None]:
    """Report that `where` is not of this kind, or cannot be read."""

    def make(error: Exception) -> ConfigError:
        said = getattr(error, "strerror", None) or str(error).splitlines()[0]
        problem = "cannot be read" if isinstance(error, OSError) else f"is not {kind}"
        return ConfigError(f"data.name: {where()} {problem}: {said}")

    return translate_error((OSError, ValueError, csv.Error), make)


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"data.name: {where} is not a JSON object")
    return row


def _of_split(files: list[Path], name: str, split: str) -> list[Path]:
    """Select the files whose names contain `split`; all files if no name contains a split and `split` is train."""
    words = {path: re.split(r"[^a-z]+", path.stem.lower()) for path in files}
    splits = {path: next((_SPLITS[word] for word in words[path] if word in _SPLITS), None) for path in files}
    wanted = _SPLITS.get(split, split)
    if not any(splits.values()) and wanted == "train":
        return files
    chosen = [path for path in files if splits[path] == wanted]
    if not chosen:
        raise ConfigError(f"data.split: no file of {name} is named {split}; it has {_shown(p.name for p in files)}")
    return chosen


def _shown(names: Iterator[str]) -> str:
    first = list(islice(names, 6))
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")


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
