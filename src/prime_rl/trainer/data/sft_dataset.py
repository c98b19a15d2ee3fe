"""Opens the configured data sets, holds out validation data, and encodes examples to batches on all ranks."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from loguru import logger
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.training.sft_data import SFTDataConfig, SFTFakeDataConfig, SFTValConfig, is_local
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.rollouts.rendering.conversations import read_row
from prime_rl.rollouts.rendering.renderer import read_template
from prime_rl.storage.checkpoint_artifacts import hash_file, settings_digest
from prime_rl.trainer.data.chat_rendering import ExampleEncoder, RenderedSequence, show_sequence
from prime_rl.trainer.data.packed_stream import (
    Contents,
    InMemorySource,
    InterleavedSource,
    PackedRow,
    PackedStream,
    RowStream,
    State,
    StreamedSource,
    pack_all,
    permutation,
    truncate,
)
from prime_rl.trainer.data.training_files import (
    LocatedRow,
    columns_without_none,
    find_files,
    is_saved,
    load_saved,
    locate_errors,
    read_local,
    read_rows,
)
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import RankConsensus, World

# Suffixes of `data.seed` for draws other than a pass through all data, whose seed is [seed, pass]. NumPy pads seeds
# with zeros, so these differ from it in the fourth number.
_HOLD_OUT, _VALIDATE, _SHARES = (0, 0, 1), (0, 0, 2), (0, 0, 3)
_ENCODED_PER_RANK = 16
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 64
"""What is hashed of a streamed file: so many evenly spread blocks, with the first and the last byte."""


@dataclass(frozen=True, slots=True)
class SFTData:
    """The data of a run."""

    batches: PackedStream  # training data
    held_out: list[PackedRow] | None  # packed rows of the validation data; None without validation
    again: Callable[[], PackedStream]  # opens the training data a second time

    def count_steps(self, step: int) -> int:
        """Number the next batch `step`, and return the steps of the run. All ranks call it together.

        These are `max_steps`, or `step` and the rest of the pass, which depends on the position and present settings.
        """
        batches = self.batches
        batches.num_yielded = step
        if batches.steps is None:
            copy = self.again()
            copy.restore(batches.state())
            rest = copy.count()
            batches.steps = step + rest
            part = f"the rest of the pass is {rest} of" if step else "one pass over the data is"
            logger.info(f"{part} {batches.steps} steps")
        return batches.steps


def open_tokenizer(config: SFTConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer with the configured chat template, which is published with it."""
    tokenizer = load_tokenizer(config.tokenizer, config.model)
    tokenizer.chat_template = read_template(config.rendering.chat_template) or tokenizer.chat_template
    return tokenizer


def open_data(config: SFTConfig, tokenizer: PreTrainedTokenizerBase, world: World | None = None) -> SFTData:
    """Open all data of a run. All ranks of `world` call it together and share the tokenizing.

    Raises:
        ConfigError: data are missing, empty or invalid.
    """
    source = config.data
    if source.type == "fake":
        fake, limits = FakeSequences(source, tokenizer.vocab_size), (config.max_steps, config.wait_timeout_seconds)
        stream = PackedStream(fake, source.seq_len, source.batch_size, False, *limits)
        return SFTData(stream, None, lambda: stream)
    encoder = ExampleEncoder(tokenizer, source, config.rendering.chat_template_args)
    stack, sharing = source.pack_function == "stack", SharedEncoder(world)
    sets = [open_dataset(source, *which) for which in source.sets]
    can_resume = config.ckpt is not None and not config.bench
    contents = [
        identify(source, *which, rows) if can_resume else (which[0], None)
        for which, rows in zip(source.sets, sets, strict=True)
    ]
    held_out: list[RenderedSequence] | None = None
    if config.val is not None and not config.bench:
        if config.val.name or config.val.split:
            rows = _open_validation(config.val, source)
        else:
            parts = [_hold_out(one, config.val.fraction, [source.seed, *_HOLD_OUT, i]) for i, one in enumerate(sets)]
            sets, rows = [train for train, _ in parts], _choose([held for _, held in parts], config.val, source)
        held_out = sharing(rows, lambda row: encode_row(row, encoder, source.seq_len))
        if not held_out:
            raise ConfigError(
                "val: no example has a trained token within data.seq_len; increase it, or check data.loss_mask"
            )

    def make() -> PackedStream:
        mixed = interleave(sets, source, contents, once=config.max_steps is None)
        encoded = EncodedExamples(mixed, encoder, source, sharing)
        return PackedStream(
            encoded, source.seq_len, source.batch_size, stack, config.max_steps, config.wait_timeout_seconds,
            encoded.warn_of_cut,
        )  # fmt: skip

    return SFTData(make(), None if held_out is None else pack_all(held_out, source.seq_len, stack), make)


class MappedRows(Sequence[LocatedRow]):
    """Rows of a memory-mapped data set of the `datasets` library, with their locations."""

    def __init__(self, dataset: Any, locate: Callable[[int, Any], LocatedRow]) -> None:
        self._dataset, self._locate = dataset, locate
        self.fingerprint = str(dataset._fingerprint)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._locate(index + 1, self._dataset[index])


def open_dataset(config: SFTDataConfig, name: str, subset: str | None, split: str) -> Sequence[LocatedRow] | RowStream:
    """Open one of `config.sets`. Raises ConfigError if it is missing or empty; in memory also if a row is invalid."""
    if is_local(name) and not is_saved(name):
        if config.streaming:
            return stream_files(find_files(name, subset, split))
        rows: Sequence[LocatedRow] = list(read_local(name, subset, split))
        checked = rows
    else:
        saved = is_saved(name)
        dataset, commit = (
            (load_saved(name, split), None) if saved else _load_from_hub(name, subset, split, config.streaming)
        )

        def locate(number: int, example: Any) -> LocatedRow:
            return f"row {number} of {name}", columns_without_none(example)

        if config.streaming:
            return RowStream(dataset.to_iterable_dataset() if saved else dataset, locate, commit)
        rows = MappedRows(dataset, locate)
        checked = [rows[i] for i in range(min(1, len(rows)))]  # all rows have the same columns
    if not rows:
        raise ConfigError(f"data.name: {name} is empty")
    for row in checked:
        locate_errors(row, lambda columns: read_row(columns, config))
    return rows


def identify(
    config: SFTDataConfig, name: str, subset: str | None, split: str, rows: Sequence[LocatedRow] | RowStream
) -> tuple[str, str | None]:
    """Return the name of an opened data set, and what identifies its contents when a run resumes.

    Files in memory are hashed whole. Streamed files, which may be larger than memory, are identified by their sizes and
    4 MiB in evenly spread blocks. Data of the `datasets` library have a fingerprint: on the hub it changes with the
    repository. A stream from the hub has its commit.
    """
    if is_saved(name):
        return name, str(load_saved(name, split)._fingerprint)
    if not is_local(name):
        return name, rows.fingerprint if isinstance(rows, MappedRows | RowStream) else None
    hash_one = _hash_blocks if config.streaming else hash_file
    return name, settings_digest({"files": [hash_one(file) for file in find_files(name, subset, split)]})


def _hash_blocks(file: Path) -> str:
    """Hash the size of a file and blocks of it; all of a file that is not larger than them together."""
    size = file.stat().st_size
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        return hash_file(file)
    digest = xxhash.xxh3_128(b"%d " % size)
    with file.open("rb") as content:
        for block in range(_NUM_BLOCKS):
            content.seek((size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1))
            digest.update(content.read(_BLOCK_BYTES))
    return digest.hexdigest()


def stream_files(files: list[Path]) -> RowStream:
    """Stream the rows of local files one after the other."""
    from datasets import IterableDataset

    dataset = IterableDataset.from_generator(_examples_of, gen_kwargs={"files": files})
    return RowStream(dataset, lambda _, example: (example["where"], example["columns"]))


def _examples_of(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from ({"where": where, "columns": columns} for where, columns in read_rows(file))


def _load_from_hub(name: str, subset: str | None, split: str, streaming: bool) -> tuple[Any, str | None]:
    """Return a data set and, of a stream, the commit of the hub that it reads."""
    from datasets import load_dataset, load_dataset_builder

    problem = f"data.name: cannot load {name!r} as a local path or from the hub"
    kinds = (OSError, ValueError, RuntimeError)  # not found, no such configuration or split, a script
    with translate_error(kinds, lambda error: ConfigError(f"{problem}: {summarize_exception(error)}")):
        if not streaming:
            return load_dataset(name, subset, split=split), None
        builder = load_dataset_builder(name, subset)
        return builder.as_streaming_dataset(split=split), builder.hash


def interleave(
    sets: Sequence[Sequence[LocatedRow] | RowStream], config: SFTDataConfig, contents: Contents, once: bool
) -> InterleavedSource:
    """Combine the examples of all sets: by their shares, or each once per pass; `once` ends after one pass."""
    sources: list[InMemorySource | StreamedSource] = []
    if config.probabilities or config.streaming:
        for i, one in enumerate(sets):
            seed = [config.seed, *_SHARES, i] if config.shuffle else None
            if isinstance(one, RowStream):
                sources.append(StreamedSource(one, config.shuffle_buffer, seed, contents[i : i + 1]))
            else:
                sources.append(InMemorySource(one, seed, contents[i : i + 1]))
    else:
        sources.append(InMemorySource(ConcatDataset(sets), [config.seed] if config.shuffle else None, contents))
    stop = {"all_exhausted": "all", "first_exhausted": "first"}[config.stopping_strategy] if once else None
    return InterleavedSource(sources, config.probabilities or [1.0] * len(sources), cast(Any, stop))


def _open_validation(val: SFTValConfig, config: SFTDataConfig) -> list[LocatedRow]:
    """Open the validation data that `val` names."""
    changed = {"name": val.name, "subsets": [], "split": val.split or "train"} if val.name else {"split": val.split}
    other = config.model_copy(update={**changed, "splits": [], "probabilities": []})
    key = re.compile(r"^data\.(name|split):")
    with translate_error(ConfigError, lambda error: ConfigError(key.sub(r"val.\1:", str(error)))):
        sets = [open_dataset(other, *which) for which in other.sets]
    if config.streaming:
        return [row for stream in sets for row in cast(RowStream, stream).take(val.examples)]
    return _choose(sets, val, config)


def _choose(sets: Sequence[Any], val: SFTValConfig, config: SFTDataConfig) -> list[LocatedRow]:
    """Draw `val.examples` rows of sets in memory."""
    rows = ConcatDataset(sets)
    return [rows[int(i)] for i in permutation(len(rows), [config.seed, *_VALIDATE])[: val.examples]]


def _hold_out(rows: Any, fraction: float, seed: Sequence[int]) -> tuple[Subset, Subset]:
    """Divide rows in memory into training data, and `fraction` of them, at least one, to hold out."""
    order = permutation(len(rows), seed)
    count = max(1, round(fraction * len(order)))
    if count == len(order):
        raise ConfigError(
            f"val.fraction: {fraction:g} of {len(order)} examples leaves none to train on; lower it, or set val.name"
        )
    return Subset(rows, np.sort(order[count:])), Subset(rows, np.sort(order[:count]))


class SharedEncoder:
    """Encodes examples on all ranks together. All ranks make the same calls, from one thread at a time."""

    def __init__(self, world: World | None = None) -> None:
        """Divide the work among the ranks of `world`; None does all of it in this process."""
        self._rank, self._size = (world.rank, world.size) if world is not None else (0, 1)
        self.examples_per_call, self._ranks = 1, None  # the number of examples that a call should have
        if world is not None and world.size > 1:
            # A separate group, because batches are made in a thread during the collectives of training.
            self._ranks = RankConsensus(world, world.new_group())
            self.examples_per_call = _ENCODED_PER_RANK * world.size

    def __call__(
        self, rows: Sequence[LocatedRow], encode: Callable[[LocatedRow], list[RenderedSequence]]
    ) -> list[RenderedSequence]:
        """Encode `rows`, the same on every rank, in order. Raises ConfigError on every rank if a row is invalid."""
        if self._ranks is None:
            return [sequence for row in rows for sequence in encode(row)]
        mine = rows[self._rank :: self._size]
        parts = self._ranks.gather(lambda: [encode(row) for row in mine])
        return [sequence for i in range(len(rows)) for sequence in parts[i % self._size][i // self._size]]


class EncodedExamples:
    """Examples as token sequences of at most `seq_len` tokens, without those that contain no trained token."""

    def __init__(
        self,
        examples: InterleavedSource,
        encoder: ExampleEncoder,
        config: SFTDataConfig,
        sharing: SharedEncoder,
    ) -> None:
        self._examples, self._encoder, self._config, self._sharing = examples, encoder, config, sharing
        self._found = False
        self._warned = False

    def draw(self) -> list[RenderedSequence] | None:
        """Return the sequences of the next example, or of several if ranks share the work; None at the end.

        Raises ConfigError if a row is invalid, or a whole pass has nothing to learn.
        """
        rows = list[LocatedRow]()
        while len(rows) < self._sharing.examples_per_call and (self._found or not self._examples.passes):
            if (row := self._examples.draw()) is None:
                break
            rows.append(row)
        if not rows:
            if not self._found:
                raise ConfigError(
                    "data.name: no example has a trained token (of an assistant message or a completion) within "
                    f"data.seq_len={self._config.seq_len}"
                )
            return None
        longest = self._config.seq_len
        kept = self._sharing(rows, lambda row: encode_row(row, self._encoder, longest, self.warn_of_cut))
        self._found = self._found or bool(kept)
        return kept

    def warn_of_cut(self, where: str, length: int) -> None:
        """Log that a sequence is truncated, once."""
        if not self._warned:
            logger.warning(
                f"{where} has {length} tokens and is truncated to data.seq_len={self._config.seq_len}, as all longer "
                "sequences are; sequences without a trained token are skipped"
            )
        self._warned = True

    def state(self) -> State:
        """Return the position."""
        return {**self._examples.state(), "found": self._found}

    def restore(self, state: State) -> None:
        """Go to a position. Raises ConfigError if the data changed."""
        self._examples.restore(state)
        self._found = state["found"]


def encode_row(
    row: LocatedRow, encoder: ExampleEncoder, longest: int, on_cut: Callable[[str, int], None] = lambda *_: None
) -> list[RenderedSequence]:
    """Encode a row and truncate it to `longest` tokens; sequences with nothing to learn are omitted.

    `on_cut` is called with the location and the length of a truncated sequence. Raises ConfigError with the location of
    an invalid row.
    """
    kept = []
    for sequence in locate_errors(row, lambda columns: encoder.encode(columns, row[0])):
        if len(sequence) > longest:
            on_cut(row[0], len(sequence))
        if (cut := truncate(sequence, longest)) is not None:
            kept.append(cut)
    return kept


def show_samples(config: SFTConfig, count: int = 5) -> None:
    """Print the first `count` examples of each data set as they are rendered. Raises ConfigError as `open_data`."""
    source = config.data
    if source.type == "fake":
        raise ConfigError("show_sample: data.type is fake, so there are no examples to show")
    tokenizer = open_tokenizer(config)
    encoder = ExampleEncoder(tokenizer, source, config.rendering.chat_template_args)
    for which in source.sets:
        opened = open_dataset(source, *which)
        rows = (
            opened.take(count) if isinstance(opened, RowStream) else [opened[i] for i in range(min(count, len(opened)))]
        )
        for row in rows:
            sequences = locate_errors(row, partial(encoder.encode, where=row[0]))
            if not sequences:
                print(f"--- {row[0]}: 0 trained, skipped")
            for sequence in sequences:
                learned = int(sequence.loss_mask.sum())
                cut = f", truncated to {source.seq_len}" if len(sequence) > source.seq_len else ""
                print(f"--- {row[0]}: {len(sequence)} tokens{cut}, {learned} trained")
                print("\n".join(map(escape_control_chars, show_sequence(sequence, tokenizer).split("\n"))))


class FakeSequences:
    """Endless random sequences of `seq_len`, or 2 to `seq_len`, tokens; each depends on the seed and its number."""

    def __init__(self, config: SFTFakeDataConfig, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._drawn = 0

    def draw(self) -> list[RenderedSequence]:
        """Return the next sequence."""
        random = np.random.default_rng([self._config.seed, self._drawn])
        self._drawn += 1
        seq_len = self._config.seq_len
        length = seq_len if self._config.length == "fixed" else int(random.integers(2, seq_len + 1))
        return [RenderedSequence(random.integers(0, self._vocabulary, length), np.arange(length) > 0)]

    def state(self) -> State:
        """Return the position."""
        return {"drawn": self._drawn}

    def restore(self, state: State) -> None:
        """Go to a position."""
        self._drawn = state["drawn"]
