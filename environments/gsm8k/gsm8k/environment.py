"""The environment: questions from the Hugging Face hub or a local file, with a reward for the correct number."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from .environment_tools.numbers import final_number, number_of, show_number
from .environment_tools.prompts import make_prompt
from .environment_tools.rows import Row, Source, pick, text_of

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import SingleTurnEnv

DATASET = "openai/gsm8k"
SUBSET = "main"
SYSTEM_PROMPT = "Solve the problem step by step. End with the answer, a number alone, in \\boxed{}."


def load_environment(
    dataset_name: str = DATASET,
    dataset_subset: str | None = SUBSET,
    train_split: str = "train",
    eval_split: str = "test",
    data_path: str | None = None,
    eval_data_path: str | None = None,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    dataset_shuffle: bool = False,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> "SingleTurnEnv":
    """Make the environment: one question, whose answer is a number; for what counts as one see `final_number`.

    Args:
        dataset_name: data set of the hub with columns `question` and `answer`, the latter ending in `#### number`.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation, read when it is needed.
        data_path: read this `.jsonl`, `.json` or `.parquet` file instead; nothing is then read from the hub.
        eval_data_path: read this file for evaluation; without it, `data_path` is used for evaluation too.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        dataset_shuffle: shuffle the training examples before `num_train_examples` are selected.
        seed: seed of the shuffle.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: a missing or malformed file (the message names file and row), or invalid arguments.
    """
    import verifiers as vf

    def example(row: Row) -> dict[str, Any]:
        return _example(row, system_prompt)

    def evaluation(source: Source) -> "Dataset":
        return _dataset(pick(source.examples(example), num_eval_examples))

    examples = Source(data_path, dataset_name, dataset_subset, train_split).examples(example)
    eval_dataset: Any = None
    if eval_data_path:
        eval_dataset = evaluation(Source(path=eval_data_path))
    elif not data_path:

        def eval_dataset() -> "Dataset":
            return evaluation(Source(None, dataset_name, dataset_subset, eval_split))

    return vf.SingleTurnEnv(
        dataset=_dataset(pick(examples, num_train_examples, seed if dataset_shuffle else None)),
        eval_dataset=eval_dataset,
        rubric=vf.Rubric(funcs=[correct_answer, has_answer], weights=[1.0, 0.0]),
    )


def correct_answer(completion: Any, answer: str, parser: Any) -> float:
    """1 if the reply's final number is the right one, else 0."""
    number = final_number(parser.parse_answer(completion) or "")
    return float(number is not None and number == Fraction(answer))


def has_answer(completion: Any, parser: Any) -> float:
    """1 if the reply has a final number."""
    return float(final_number(parser.parse_answer(completion) or "") is not None)


def _example(row: Row, system_prompt: str) -> dict[str, Any]:
    question = text_of(row, "question")
    # The whole answer may be the number alone.
    number = number_of(text_of(row, "answer").rpartition("####")[2])
    if number is None:
        raise ValueError(f"'answer' does not end in '#### number': {text_of(row, 'answer')[-60:]!r}")
    return {"prompt": make_prompt(question, system_prompt), "answer": show_number(number)}


def _dataset(examples: Sequence[dict[str, Any]]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_list(list(examples))
