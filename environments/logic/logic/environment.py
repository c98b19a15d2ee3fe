"""The environment: a puzzle, and a reward for an answer that its checker accepts."""

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from logic.countdown import Countdown
from logic.knights import Knights
from logic.ordering import Ordering
from logic.puzzle import LEVELS, Puzzle
from logic.sudoku import Sudoku

from .environment_tools.prompts import final_answer, has_answer, make_dataset
from .environment_tools.rows import Row, pick, read_splits

if TYPE_CHECKING:
    from verifiers import SingleTurnEnv

SYSTEM_PROMPT = "Solve the puzzle. End with the answer between <answer> and </answer>."
KINDS: dict[str, type[Puzzle]] = {kind.kind: kind for kind in (Countdown, Sudoku, Knights, Ordering)}


def load_environment(
    kinds: Sequence[str] = tuple(KINDS),
    level: str = "medium",
    data_path: str | None = None,
    eval_data_path: str | None = None,
    dataset_name: str | None = None,
    dataset_subset: str | None = None,
    train_split: str = "train",
    eval_split: str = "test",
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    num_generated: int = 1000,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> "SingleTurnEnv":
    """Make the environment. Without a file or data set it generates puzzles.

    The reward is 1 if the checker of the puzzle accepts the last <answer> of the reply. `has_answer` is a metric with
    weight 0.

    Args:
        kinds: kinds of generated puzzles: countdown, sudoku, knights, ordering.
        level: "easy", "medium" or "hard" generated puzzles.
        data_path: a `.jsonl`, `.json` or `.parquet` file of puzzles (see the README).
        eval_data_path: the same for evaluation; without it, `data_path` is used for evaluation too.
        dataset_name: a data set of the hub with such rows.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        num_generated: number of generated puzzles for training; an eighth of it for evaluation.
        seed: seed of the generated puzzles.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: a missing or malformed file, or invalid arguments.
    """
    import verifiers as vf

    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kind {unknown[0]!r} is not one of {', '.join(KINDS)}")
    if level not in LEVELS or not kinds or num_generated < 1:
        raise ValueError(f"need a level of {', '.join(LEVELS)}, at least one kind, and a positive num_generated")
    if data_path or dataset_name:
        train, evaluation = read_splits(
            read_puzzle, data_path, eval_data_path, dataset_name, dataset_subset, train_split, eval_split
        )
    else:
        train = list(islice(make_puzzles(seed, "train", kinds, level), num_generated))
        evaluation = list(islice(make_puzzles(seed, "eval", kinds, level), max(1, num_generated // 8)))
    train, evaluation = pick(train, num_train_examples), pick(evaluation, num_eval_examples)
    scores = _make_scores([*train, *evaluation])
    return vf.SingleTurnEnv(
        dataset=make_dataset(((p.question, p.solution) for p in train), system_prompt),
        eval_dataset=make_dataset(((p.question, p.solution) for p in evaluation), system_prompt, len(train)),
        rubric=vf.Rubric(funcs=scores, weights=[1.0] + [0.0] * (len(scores) - 1)),
    )


def make_puzzles(seed: int, part: str, kinds: Sequence[str], level: str) -> Iterator[Puzzle]:
    """Yield puzzles of the kinds in turn, without end, the same for the same seed."""
    sources = {kind: Random(f"logic {kind} {part} {seed}") for kind in kinds}
    while True:
        for kind, source in sources.items():
            yield KINDS[kind].make(source, level)


def read_puzzle(row: Row) -> Puzzle:
    """Return the puzzle of a row with `kind`, or with `target` for countdown.

    Raises:
        ValueError: the row is malformed, or its puzzle has no solution.
    """
    kind = row.get("kind", "countdown" if "target" in row else None)
    if kind not in KINDS:
        raise ValueError(f"`kind` is {kind!r}, not one of {', '.join(KINDS)}")
    return KINDS[kind].read(row)


def _make_scores(puzzles: Sequence[Puzzle]) -> list[Any]:
    def solved(completion: Any, info: Any) -> float:
        """1 if the answer is correct."""
        answer = final_answer(completion)
        return float(answer is not None and puzzles[info["number"]].is_solved_by(answer))

    return [solved, has_answer]
