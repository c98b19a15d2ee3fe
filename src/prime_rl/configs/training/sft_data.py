"""`data` and `val` of `uv run sft`: training and validation data."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from prime_rl.configs.lists import StrList, split_commas
from prime_rl.configs.loading.base_config import BaseConfig, common

FloatList = Annotated[list[FiniteFloat], BeforeValidator(split_commas)]


class LossMaskConfig(BaseConfig):
    """Messages to train on. In text data, `user` is the prompt and `assistant` the completion."""

    system: bool = False
    """Train on system messages."""

    user: bool = False
    """Train on user messages."""

    assistant: bool = True
    """Train on assistant messages."""

    tool: bool = False
    """Train on tool messages."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.system or self.user or self.assistant or self.tool):
            raise ValueError("no message is trained on; set one of system, user, assistant, tool")
        return self


class _Data(BaseConfig):
    type: str
    """Type of the data."""

    seq_len: int = Field(128, ge=2, json_schema_extra=common("Data"))
    """Tokens of a packed row; longer examples are truncated."""

    batch_size: int = Field(128, ge=1, json_schema_extra=common("Data"))
    """Rows per batch (one step)."""

    micro_batch_size: int = Field(1, ge=1, json_schema_extra=common("Data"))
    """Maximum rows of one forward pass."""

    seed: int = Field(0, ge=0)
    """Seed of shuffling, of the validation split, and of random tokens."""


class SFTDataConfig(_Data):
    """Datasets of conversations or prompt-completion pairs."""

    type: Literal["sft"] = "sft"

    name: StrList = Field(["PrimeIntellect/Reverse-Text-SFT"], min_length=1, json_schema_extra=common("Data"))
    """A .jsonl, .json, .csv or .parquet file, a folder of these, or a Hugging Face id; several are mixed."""

    split: str = Field("train", json_schema_extra=common("Data"))
    """Split of a Hugging Face dataset, or of a local folder whose file names contain the split."""

    subsets: StrList = Field([])
    """Subsets to mix: configurations of a Hugging Face dataset, or files or folders of a local folder. A single file
    has no subsets."""

    splits: StrList = Field([])
    """Split of each subset or name; empty uses `split` for all."""

    probabilities: FloatList = Field([])
    """Share of the examples of each subset or name; empty mixes by size, each example once per pass."""

    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """End of a pass over data with `probabilities`: after all datasets are exhausted, or after the first."""

    messages_column: str | None = None
    """Column of the conversation; None uses `messages` if it exists."""

    prompt_column: str | None = None
    """Column of the prompt; None uses `prompt`, or `question` if there is an `answer`."""

    completion_column: str | None = None
    """Column of the completion; None uses `completion`, or `answer` if there is a `question`."""

    as_messages: bool = False
    """Render text prompts and completions as user and assistant messages with the chat template."""

    pack_function: Literal["cat", "stack"] = "cat"
    """cat concatenates several examples into a row, stack puts one example into each row. Neither computes padding."""

    shuffle: bool = True
    """Shuffle the examples of each pass."""

    streaming: bool = False
    """Stream the data, if larger than memory; needs max_steps."""

    shuffle_buffer: int = Field(10_000, ge=1)
    """Size of the shuffle buffer while streaming, in examples."""

    loss_mask: LossMaskConfig = Field(default_factory=LossMaskConfig)
    """Messages to train on; by default those of the assistant."""

    assistant_turns: Literal["all", "last"] = "all"
    """Assistant messages to which `loss_mask.assistant` applies."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        sets = len(self.subsets) or len(self.name)
        if self.subsets and len(self.name) > 1:
            raise ValueError("subsets are parts of one dataset; give one name")
        for key in ("splits", "probabilities"):
            if (count := len(getattr(self, key))) not in (0, sets):
                raise ValueError(f"{key} has {count} entries for {sets} {'subsets' if self.subsets else 'names'}")
        if self.probabilities and not (min(self.probabilities) >= 0 < sum(self.probabilities)):
            raise ValueError("probabilities must not be negative, nor all 0")
        if self.streaming and sets > 1 and not self.probabilities:
            raise ValueError("streaming several datasets needs probabilities: their sizes are unknown")
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError("prompt_column and completion_column must be set together")
        if self.prompt_column and self.messages_column:
            raise ValueError("give messages_column, or prompt_column and completion_column")
        return self

    @property
    def sets(self) -> list[tuple[str, str | None, str]]:
        """Name, subset and split of each dataset."""
        pairs: list[tuple[str, str | None]] = [(name, None) for name in self.name]
        if self.subsets and not (len(self.subsets) == 1 and Path(self.name[0]).expanduser().is_file()):
            pairs = [(self.name[0], subset) for subset in self.subsets]
        splits = self.splits or [self.split] * len(pairs)
        return [(name, subset, split) for (name, subset), split in zip(pairs, splits, strict=True)]


class SFTFakeDataConfig(_Data):
    """Random rows, for tests and benchmarks."""

    type: Literal["fake"] = "fake"

    length: Literal["fixed", "variable"] = "fixed"
    """Rows contain one full example (fixed), or several of different lengths (variable)."""


class SFTValConfig(BaseConfig):
    """Validation loss on held-out examples. Off unless this block is given."""

    name: StrList = Field([])
    """Validation data, as `data.name`; without `name` and `split`, a part of `data` is held out."""

    split: str | None = None
    """Split to validate on; without `name`, a split of `data.name`."""

    fraction: float = Field(0.05, gt=0, lt=1)
    """Share of `data` to hold out without `name` and `split`."""

    examples: int | None = Field(1000, ge=1)
    """Maximum number of validation examples, drawn with `data.seed` (the first ones of a stream); None is all."""

    interval: int = Field(100, ge=1)
    """Steps between two validations; the first is before step 0 and the last after the last step."""


def is_local(name: str) -> bool:
    """Whether `name` is a path: it exists, or looks like a file."""
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    return looks_local or path.exists() or path.suffix in (".jsonl", ".json", ".csv", ".parquet")
