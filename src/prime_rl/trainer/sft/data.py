"""Rows of supervised examples: in a fixed order given by the seed, packed, the same on every world size."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from loguru import logger
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import SFTDataConfig, SFTFakeDataConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch
from prime_rl.trainer.sft.chat import TokenSequence, encode_example

Row = list[TokenSequence]

# Rows that are being filled at the same time: enough for nearly full rows, few enough to keep the shuffled order.
_OPEN_ROWS = 32


def load_examples(config: SFTDataConfig) -> Sequence[Mapping[str, Any]]:
    """Read a local JSON-lines file, or a data set of the Hugging Face hub.

    Raises:
        ConfigError: neither exists, or a line is not a JSON object.
    """
    path = Path(config.name).expanduser()
    if path.suffix == ".jsonl" or path.is_file():
        return _read_jsonl(path)
    try:
        from datasets import load_dataset

        return cast(Sequence[Mapping[str, Any]], load_dataset(config.name, split=config.split))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"data.name: cannot load {config.name!r} as a file or from the hub: {reason}") from error


def encode_all(
    examples: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> list[TokenSequence]:
    """Encode every example; cut what is longer than `seq_len` and leave out what then has nothing to learn.

    Raises:
        ConfigError: nothing is left.
    """
    whole = [sequence for example in examples for sequence in encode_example(example, tokenizer)]
    cut = [sequence.cut(seq_len) for sequence in whole]
    kept = [sequence for sequence in cut if sequence.loss_mask.any()]
    longer = sum(len(sequence) > seq_len for sequence in whole)
    if longer or len(kept) < len(whole):
        logger.warning(
            f"{longer} of {len(whole)} sequences are longer than data.seq_len={seq_len} and were cut; "
            f"{len(whole) - len(kept)} have nothing to learn and were left out"
        )
    if not kept:
        raise ConfigError("data.name: no example has an assistant message (or completion) within data.seq_len")
    return kept


def in_order(sequences: Sequence[TokenSequence], seed: int | None, epochs: int | None) -> Iterator[TokenSequence]:
    """Go through `sequences` `epochs` times, or for ever; each time in another order unless `seed` is None."""
    for epoch in range(epochs) if epochs is not None else count():
        order = list(range(len(sequences)))
        if seed is not None:
            order = np.random.default_rng([seed, epoch]).permutation(len(sequences)).tolist()
        yield from (sequences[i] for i in order)


def pack(sequences: Iterator[TokenSequence], seq_len: int) -> Iterator[Row]:
    """Pack a stream into rows of at most `seq_len` tokens.

    Each sequence goes into the fullest open row that holds it; where none does, the fullest of `_OPEN_ROWS` rows is
    closed. Unlike packing sorted by length, this keeps long and short sequences mixed in the order they came in.
    """
    rows: list[Row] = []
    room: list[int] = []
    for sequence in sequences:
        fitting = [i for i, left in enumerate(room) if left >= len(sequence)]
        if fitting:
            best = min(fitting, key=room.__getitem__)
        else:
            if len(rows) == _OPEN_ROWS:
                fullest = room.index(min(room))
                room.pop(fullest)
                yield rows.pop(fullest)
            best = len(rows)
            rows.append([])
            room.append(seq_len)
        rows[best].append(sequence)
        room[best] -= len(sequence)
    yield from rows


def fake_sequences(config: SFTFakeDataConfig, vocabulary: int) -> Iterator[TokenSequence]:
    """Draw random sequences for ever: of `seq_len` tokens, or of 2 to `seq_len`."""
    random = np.random.default_rng(config.seed)
    while True:
        length = config.seq_len if config.length == "fixed" else int(random.integers(2, config.seq_len + 1))
        yield TokenSequence(random.integers(0, vocabulary, length), np.arange(length) > 0)


def in_batches(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """Group rows into batches of `size`; the last may be smaller."""
    while batch := list(islice(rows, size)):
        yield batch


def to_micro_batch(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows one after the other: attention keeps their segments apart, so several rows are one micro-batch."""
    sequences = [sequence for row in rows for sequence in row]
    return make_micro_batch(
        np.concatenate([s.tokens for s in sequences]),
        np.concatenate([s.loss_mask for s in sequences]),
        [len(s) for s in sequences],
    )


def _read_jsonl(path: Path) -> list[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"data.name: cannot read {path}: {error.strerror}") from None
    examples: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"data.name: {path}:{number} is not JSON: {error}") from None
        if not isinstance(example, dict):
            raise ConfigError(f"data.name: {path}:{number} is not a JSON object")
        examples.append(example)
    return examples
