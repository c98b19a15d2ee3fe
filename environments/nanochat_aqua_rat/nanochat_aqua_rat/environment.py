"""The environment: AQuA-RAT from a local folder or the Hugging Face hub, with a reward for the stated letter."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment_tools.letters import LETTERS, stated_letter
from .environment_tools.rows import Row, Source, pick
from .generated import make_rows
from .rows import example_of

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import SingleTurnEnv

DATASET = "deepmind/aqua_rat"
SYSTEM_PROMPT = (
    "You are a patient algebra tutor. Work out the answer to the multiple-choice question step by step, then end with "
    "a line of its own that says 'Answer: ' and the letter of the right option, A to E."
)
EXACT_MATCH_WEIGHT = 1.0
FORMAT_WEIGHT = 0.1


def load_environment(
    system_prompt: str = SYSTEM_PROMPT,
    train_split: str = "train",
    eval_split: str | None = "validation",
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    seed: int = 42,
    include_rationale_metadata: bool = True,
    data_dir: str | None = None,
    cache_dir: str | None = None,
    num_generated: int = 0,
) -> "SingleTurnEnv":
    """Make the environment: a question with options A to E; `stated_letter` finds the answer in a reply.

    The reward is 1.0 for the correct letter plus 0.1 for stating any letter. Metrics with weight 0 are
    `categorical_accuracy`, and for each letter `gold_X` (share of questions with this answer) and `correct_X` (share
    answered correctly): their ratio is the accuracy for that letter.

    Args:
        system_prompt: the system message; "" for none.
        train_split: split for training.
        eval_split: split for evaluation; that of the hub is read when it is needed. None reuses the training examples.
        num_train_examples: number of examples, after a shuffle; -1 uses all.
        num_eval_examples: number of examples; -1 uses all.
        seed: seed of the shuffle of the training examples, and of generated questions.
        include_rationale_metadata: keep the human solution in the column `metadata`.
        data_dir: folder with a file `{split}.jsonl` or `{split}.json` for each split; without it the hub is read.
        cache_dir: where the hub's data set is kept.
        num_generated: number of questions per split that are generated from `seed`, instead of a data set.

    Raises:
        ValueError: a missing or malformed file (the message names file and row), or invalid arguments.
    """
    import verifiers as vf

    def example(row: Row) -> dict[str, Any]:
        return example_of(row, system_prompt, include_rationale_metadata)

    def read(split: str, count: int, shuffle_seed: int | None) -> "Dataset":
        from datasets import Dataset

        if num_generated:
            rows = make_rows(num_generated, seed, split)
            return Dataset.from_list(pick(map(example, rows), count, shuffle_seed))
        path = split_file(data_dir, split) if data_dir else None
        source = Source(path, DATASET, "raw", split, cache_dir)
        return Dataset.from_list(pick(source.examples(example), count, shuffle_seed))

    if num_generated and data_dir:
        raise ValueError("num_generated and data_dir exclude each other: questions are generated or read from files")
    evaluation: Any = None
    if eval_split and (data_dir or num_generated):
        evaluation = read(eval_split, num_eval_examples, None)
    elif eval_split:

        def evaluation() -> "Dataset":
            return read(eval_split, num_eval_examples, None)

    return vf.SingleTurnEnv(
        dataset=read(train_split, num_train_examples, seed),
        eval_dataset=evaluation,
        rubric=_rubric(),
    )


def split_file(data_dir: str, split: str) -> str:
    """Return the file of a split in a folder.

    Raises:
        ValueError: there is none.
    """
    names = [Path(data_dir).expanduser() / f"{split}{suffix}" for suffix in (".jsonl", ".json")]
    for path in names:
        if path.is_file():
            return str(path)
    raise ValueError(f"there is no file {names[0]}, nor {names[1].name}")


def exact_match_reward(completion: Any, answer: str, parser: Any) -> float:
    """1 if the letter stated is the right one."""
    return float(stated_letter(parser.parse_answer(completion) or "") == answer)


def format_reward(completion: Any, parser: Any) -> float:
    """1 if the reply states a letter, right or wrong."""
    return float(stated_letter(parser.parse_answer(completion) or "") is not None)


def categorical_accuracy(completion: Any, answer: str, parser: Any) -> float:
    """1 if the letter stated is the right one: the reward without its weights."""
    return exact_match_reward(completion, answer, parser)


def _rubric() -> Any:
    import verifiers as vf

    rubric = vf.Rubric(funcs=[exact_match_reward, format_reward], weights=[EXACT_MATCH_WEIGHT, FORMAT_WEIGHT])
    rubric.add_metric(categorical_accuracy)
    for letter in LETTERS:
        for metric in _letter_metrics(letter):
            rubric.add_metric(metric)
    return rubric


def _letter_metrics(letter: str) -> tuple[Any, Any]:
    def gold(answer: str) -> float:
        return float(answer == letter)

    def correct(completion: Any, answer: str, parser: Any) -> float:
        return float(answer == letter and exact_match_reward(completion, answer, parser))

    gold.__name__, correct.__name__ = f"gold_{letter}", f"correct_{letter}"  # verifiers names metrics after functions
    return gold, correct
