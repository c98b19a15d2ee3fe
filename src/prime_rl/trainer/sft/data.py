"""From configured data to batches: which sets are opened, what validation holds out, how examples become sequences."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
from loguru import logger
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.sft_data import SFTDataConfig, SFTFakeDataConfig, ValConfig, is_local
from prime_rl.errors import ConfigError
from prime_rl.trainer.sft import hub
from prime_rl.trainer.sft.chat import TokenSequence, encode_example
from prime_rl.trainer.sft.examples import RowError, read_example
from prime_rl.trainer.sft.files import Row as ExampleRow
from prime_rl.trainer.sft.files import find_files, read_rows
from prime_rl.trainer.sft.sources import (
    FileReader,
    InMemory,
    Interleaved,
    Reader,
    Source,
    State,
    Streamed,
    permuted,
)
from prime_rl.trainer.sft.stream import Batches, Row, pack_all

# What follows `data.seed` in the seeds of other draws than a pass through all data, which is [seed, pass]; NumPy takes
# missing numbers for zeros, so these differ from it in the fourth place.
_HOLD_OUT, _VALIDATE, _SHARES = (0, 0, 1), (0, 0, 2), (0, 0, 3)


@dataclass(frozen=True, slots=True)
class Data:
    """What a run learns from and is validated on.

    Attributes:
        batches: to train on.
        held_out: packed rows to validate on; None without validation.
    """

    batches: Batches
    held_out: list[Row] | None


def open_data(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Open all data of a run.

    Raises:
        ConfigError: data are missing, empty or bad, or have no end where the number of steps is asked of them.
    """
    source = config.data
    if source.type == "fake":
        fake = FakeSequences(source, tokenizer.vocab_size)
        return Data(_batches(fake, source, config.max_steps, config.wait_timeout_seconds), None)
    sets = [open_set(source, *which) for which in source.sets]
    held_out: list[TokenSequence] | None = None
    if config.val is not None and not config.bench:
        rows = _validation_rows(config.val, source, sets)
        held_out = [sequence for row in rows for sequence in encode_row(row, tokenizer, source)]
        if not held_out:
            raise ConfigError("val: no example has anything to learn within data.seq_len")

    def make(steps: int | None) -> Batches:
        mixed = mix(sets, source, once=config.max_steps is None)
        return _batches(Encoded(mixed, tokenizer, source), source, steps, config.wait_timeout_seconds)

    steps = config.max_steps
    if steps is None:
        steps = make(None).count()
        logger.info(f"one pass over the data is {steps} steps")
    stack = source.pack_function == "stack"
    return Data(make(steps), None if held_out is None else pack_all(held_out, source.seq_len, stack))


@dataclass(slots=True)
class DataSet:
    """An opened data set.

    Attributes:
        rows: where it is in memory (or mapped): any example by its number.
        chosen: numbers of the examples to train on.
        stream: where it is read lazily: what opens a reader of it.
    """

    rows: Sequence[ExampleRow] = ()
    chosen: Any = None
    stream: Callable[[int], Reader] | None = None


def open_set(config: SFTDataConfig, name: str, subset: str | None, split: str) -> DataSet:
    """Open one of `config.sets`; what is in memory is looked through at once.

    Raises:
        ConfigError: it is missing, empty or bad.
    """
    if is_local(name):
        files = find_files(name, subset, split)
        if config.streaming:
            return DataSet(stream=lambda _: FileReader(files))
        rows: Sequence[ExampleRow] = [row for file in files for row in read_rows(file)]
        checked = rows
    elif config.streaming:
        return DataSet(stream=hub.open_stream(name, subset, split))
    else:
        rows = hub.open_mapped(name, subset, split)
        checked = [rows[i] for i in range(min(1, len(rows)))]  # all have its columns
    if not rows:
        raise ConfigError(f"data.name: {name} is empty")
    for row in checked:
        _located(row, lambda example: read_example(example, config))
    return DataSet(rows, np.arange(len(rows)))


def mix(sets: Sequence[DataSet], config: SFTDataConfig, once: bool) -> Interleaved:
    """Order the examples of all sets, by their shares or, without any, each once in a pass.

    Args:
        sets: opened; their `chosen` examples are used.
        config: shares and seeds.
        once: end after one pass.
    """
    sources: list[Source] = []
    if config.probabilities or config.streaming:
        for i, one in enumerate(sets):
            seed = [config.seed, *_SHARES, i] if config.shuffle else None
            if one.stream is not None:
                sources.append(Streamed(one.stream, config.shuffle_buffer, seed))
            else:
                sources.append(InMemory(one.rows, one.chosen, seed))
    else:
        sources.append(InMemory(*_chained(sets), [config.seed] if config.shuffle else None))
    stop = {"all_exhausted": "all", "first_exhausted": "first"}[config.stopping_strategy] if once else None
    return Interleaved(sources, config.probabilities or [1.0] * len(sources), cast(Any, stop))


def _validation_rows(val: ValConfig, config: SFTDataConfig, sets: Sequence[DataSet]) -> list[ExampleRow]:
    """Choose the examples to validate on; what is held out is taken from the `chosen` ones of `sets`."""
    if val.name or val.split:
        changed = {"name": val.name, "subsets": [], "split": val.split or "train"} if val.name else {"split": val.split}
        other = config.model_copy(update={**changed, "splits": [], "probabilities": []})
        try:
            sets = [open_set(other, *which) for which in other.sets]
        except ConfigError as error:
            raise ConfigError(re.sub(r"^data\.(name|split):", r"val.\1:", str(error))) from None
    else:
        sets = [_hold_out(one, val.fraction, [config.seed, *_HOLD_OUT, i]) for i, one in enumerate(sets)]
    if config.streaming:
        streams = [one.stream(0) for one in sets if one.stream is not None]
        return [row for stream in streams for row in stream.take(val.examples or 2**62)]
    rows, chosen = _chained(sets)
    order = permuted(chosen, [config.seed, *_VALIDATE])
    return [rows[int(i)] for i in order[: val.examples]]


def _hold_out(one: DataSet, fraction: float, seed: Sequence[int]) -> DataSet:
    """Take `fraction` of the examples, at least one, out of those to train on."""
    order = permuted(one.chosen, seed)
    count = max(1, round(fraction * len(order)))
    if count == len(order):
        raise ConfigError(
            f"val.fraction: {fraction:g} of {len(order)} examples leaves none to train on; lower it, or give val.name"
        )
    one.chosen = np.sort(order[count:])
    return DataSet(one.rows, np.sort(order[:count]))


class _Chained(Sequence[ExampleRow]):
    """Several sequences as one."""

    def __init__(self, parts: Sequence[Sequence[ExampleRow]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]


def _chained(sets: Sequence[DataSet]) -> tuple[Sequence[ExampleRow], Any]:
    starts = [0, *accumulate(len(one.rows) for one in sets)]
    chosen = [one.chosen + start for one, start in zip(sets, starts, strict=False)]
    return _Chained([one.rows for one in sets]), np.concatenate(chosen)


class Encoded:
    """Examples as token sequences of at most `seq_len`; those without anything to learn within it are left out."""

    def __init__(self, examples: Interleaved, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig) -> None:
        self._examples, self._tokenizer, self._config = examples, tokenizer, config
        self._found = False
        self._told = False

    def draw(self) -> list[TokenSequence] | None:
        """The sequences of the next example; None at the end.

        Raises:
            ConfigError: a bad row, or a whole pass without anything to learn.
        """
        row = None if not self._found and self._examples.passes else self._examples.draw()
        if row is None:
            if not self._found:
                raise ConfigError(
                    "data.name: no example has anything to learn (an assistant message, a completion) within "
                    f"data.seq_len={self._config.seq_len}"
                )
            return None
        kept = encode_row(row, self._tokenizer, self._config, self._tell)
        self._found = self._found or bool(kept)
        return kept

    def _tell(self, where: str, length: int) -> None:
        if not self._told:
            logger.warning(
                f"{where} has {length} tokens and is cut to data.seq_len={self._config.seq_len}; so are all that are "
                "longer, and those with nothing to learn within it are left out"
            )
        self._told = True

    def state(self) -> State:
        """The position."""
        return {**self._examples.state(), "found": self._found}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError where the data are others."""
        self._examples.restore(state)
        self._found = state["found"]


def encode_row(
    row: ExampleRow,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTDataConfig,
    tell_cut: Callable[[str, int], None] = lambda *_: None,
) -> list[TokenSequence]:
    """Encode a row, cut to `seq_len`; without what then has nothing to learn.

    Args:
        row: where it stands, and its columns.
        tokenizer: with the chat template, if the row holds messages.
        config: what is learned.
        tell_cut: called with the place and the length of a sequence that is cut.

    Raises:
        ConfigError: the row is bad; names its place.
    """
    whole = _located(row, lambda example: encode_example(example, tokenizer, config))
    for sequence in whole:
        if len(sequence) > config.seq_len:
            tell_cut(row[0], len(sequence))
    return [cut for sequence in whole if (cut := sequence.cut(config.seq_len)).loss_mask.any()]


def _located(row: ExampleRow, use: Callable[[Any], Any]) -> Any:
    where, example = row
    try:
        return use(example)
    except RowError as error:
        raise ConfigError(f"data.name: {where}: {error}") from None


class FakeSequences:
    """Random sequences for ever, each a function of the seed and its number: of `seq_len` tokens, or 2 to `seq_len`."""

    def __init__(self, config: SFTFakeDataConfig, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._drawn = 0

    def draw(self) -> list[TokenSequence]:
        """The next sequence."""
        random = np.random.default_rng([self._config.seed, self._drawn])
        self._drawn += 1
        seq_len = self._config.seq_len
        length = seq_len if self._config.length == "fixed" else int(random.integers(2, seq_len + 1))
        return [TokenSequence(random.integers(0, self._vocabulary, length), np.arange(length) > 0)]

    def state(self) -> State:
        """The position."""
        return {"drawn": self._drawn}

    def restore(self, state: State) -> None:
        """Go to a position."""
        self._drawn = state["drawn"]


def _batches(
    sequences: Encoded | FakeSequences, config: SFTDataConfig | SFTFakeDataConfig, steps: int | None, timeout_s: float
) -> Batches:
    stack = config.type == "sft" and config.pack_function == "stack"
    return Batches(sequences, config.seq_len, config.batch_size, stack, steps, timeout_s)
