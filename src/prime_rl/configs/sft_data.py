"""Keys of the data that `uv run sft` learns from and is validated on."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.shared import StrList, split_commas

FloatList = Annotated[list[FiniteFloat], BeforeValidator(split_commas)]


class LossMaskConfig(BaseConfig):
    """Which messages are learned; `user` means the prompt and `assistant` the completion where these are text."""

    system: bool = False
    """Learn system messages."""

    user: bool = False
    """Learn user messages."""

    assistant: bool = True
    """Learn assistant messages."""

    tool: bool = False
    """Learn tool messages."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.system or self.user or self.assistant or self.tool):
            raise ValueError("nothing is learned; set one of system, user, assistant, tool")
        return self


class SFTDataConfig(BaseConfig):
    """Data sets of conversations or prompt-completion pairs."""

    type: Literal["sft"] = "sft"
    """Kind of data."""

    name: StrList = Field(["PrimeIntellect/Reverse-Text-SFT"], min_length=1)
    """A .jsonl, .json, .csv or .parquet file, a folder of these, or a Hugging Face id; several are mixed."""

    split: str = "train"
    """Split of a Hugging Face data set, or of a local folder where the names of its files tell splits apart."""

    subsets: StrList = Field([])
    """Subsets of the data set to mix: configurations of a Hugging Face data set, files or folders of a local folder.
    A single file is its own only subset."""

    splits: StrList = Field([])
    """Split of each of several subsets or names; empty means `split` for all."""

    probabilities: FloatList = Field([])
    """Share of the examples that each of several subsets or names gets; empty goes once through all, mixed by size."""

    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When one pass over data with `probabilities` ends: once all sets were gone through, or the first was."""

    messages_column: str | None = None
    """Column of the conversation; None takes `messages` where there is one."""

    prompt_column: str | None = None
    """Column of the prompt; None takes `prompt`, or `question` beside `answer`."""

    completion_column: str | None = None
    """Column of the completion; None takes `completion`, or `answer` beside `question`."""

    as_messages: bool = False
    """Take a prompt and a completion in text as a user's and an assistant's message, through the chat template."""

    seq_len: int = Field(128, ge=2)
    """Length of a packed row, tokens; longer examples are cut."""

    batch_size: int = Field(128, ge=1)
    """Rows in a batch (one step)."""

    micro_batch_size: int = Field(1, ge=1)
    """Most rows in one forward pass."""

    pack_function: Literal["cat", "stack"] = "cat"
    """How examples become rows: several one after the other, or each a row of its own. Neither computes padding."""

    shuffle: bool = True
    """Shuffle each pass."""

    seed: int = 0
    """Seed of the shuffling, and of what validation holds out."""

    streaming: bool = False
    """Read lazily, for data larger than memory; needs max_steps."""

    shuffle_buffer: int = Field(10_000, ge=1)
    """Examples that are shuffled among each other while streaming."""

    loss_mask: LossMaskConfig = LossMaskConfig()
    """Which messages are learned; the assistant's only by default."""

    assistant_turns: Literal["all", "last"] = "all"
    """Which of the assistant's messages `loss_mask.assistant` means."""

    @model_validator(mode="after")
    def _sets_fit_together(self) -> Self:
        sets = len(self.subsets) or len(self.name)
        if self.subsets and len(self.name) > 1:
            raise ValueError("subsets are parts of one data set; give one name")
        for key in ("splits", "probabilities"):
            if (count := len(getattr(self, key))) not in (0, sets):
                raise ValueError(f"{key} has {count} entries for {sets} {'subsets' if self.subsets else 'names'}")
        if self.probabilities and not (min(self.probabilities) >= 0 < sum(self.probabilities)):
            raise ValueError("probabilities must not be negative, nor all 0")
        if self.streaming and sets > 1 and not self.probabilities:
            raise ValueError("streaming several sets needs probabilities: their sizes are not known beforehand")
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError("prompt_column and completion_column belong together")
        if self.prompt_column and self.messages_column:
            raise ValueError("give messages_column, or prompt_column and completion_column")
        return self

    @property
    def sets(self) -> list[tuple[str, str | None, str]]:
        """Name, subset and split of each set."""
        pairs: list[tuple[str, str | None]] = [(name, None) for name in self.name]
        if self.subsets and not (len(self.subsets) == 1 and Path(self.name[0]).expanduser().is_file()):
            pairs = [(self.name[0], subset) for subset in self.subsets]
        splits = self.splits or [self.split] * len(pairs)
        return [(name, subset, split) for (name, subset), split in zip(pairs, splits, strict=True)]


class SFTFakeDataConfig(BaseConfig):
    """Random rows, for tests and benchmarks."""

    type: Literal["fake"] = "fake"
    """Kind of data."""

    seq_len: int = Field(128, ge=2)
    """Length of a row, tokens."""

    batch_size: int = Field(128, ge=1)
    """Rows in a batch (one step)."""

    micro_batch_size: int = Field(1, ge=1)
    """Most rows in one forward pass."""

    length: Literal["fixed", "variable"] = "fixed"
    """Whether rows hold one full example or several of different lengths."""

    seed: int = 0
    """Seed of the tokens."""


class ValConfig(BaseConfig):
    """Loss on examples that are not trained on. Off unless this block is given."""

    name: StrList = Field([])
    """What to validate on, as `data.name`; with neither `name` nor `split`, a part of `data` is held out."""

    split: str | None = None
    """Split to validate on; by itself, that split of `data.name`."""

    fraction: float = Field(0.05, gt=0, lt=1)
    """Share of `data` that is held out where neither `name` nor `split` is given."""

    examples: int | None = Field(1000, ge=1)
    """Most examples to validate on, drawn by `data.seed`, of a stream the first; None takes all."""

    interval: int = Field(100, ge=1)
    """Steps between two validations; there is one before the first step and one after the last in any case."""


def is_local(name: str) -> bool:
    """Whether `name` is meant as a path: it exists, or looks like a file."""
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    return looks_local or path.exists() or path.suffix in (".jsonl", ".json", ".csv", ".parquet")
