"""logic: generated puzzles have the solutions they claim, checkers accept only solutions, and rows are checked."""

import json
from itertools import islice

import pytest
import verifiers as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from logic.countdown import Countdown
from logic.environment import KINDS, load_environment, make_puzzles, read_puzzle
from logic.knights import Knights
from logic.ordering import Ordering
from logic.puzzle import LEVELS
from logic.sudoku import Sudoku

from .scripted import scores

COUNTDOWN = read_puzzle({"numbers": [3, 4, 6], "target": 18})
SUDOKU = Sudoku.read({"grid": "1234 34.. 21.. 4321"})
KNIGHTS = Knights.read({"statements": [["Ada", "is", "Ben", "knave"], ["Ben", "same", "Ada", "Ben"]]})
ORDERING = Ordering.read({"names": ["Ada", "Ben", "Cleo"], "clues": [["Ben", "next", "Ada"], ["Cleo", "at", 1]]})


@pytest.mark.parametrize("level", LEVELS)
def test_generated_puzzles_accept_their_solution_and_no_other_ones(level):
    puzzles = list(islice(make_puzzles(1, "train", list(KINDS), level), 40))
    for puzzle in puzzles:
        assert puzzle.is_solved_by(puzzle.solution), puzzle
        others = {other.solution for other in puzzles if type(other) is type(puzzle)} - {puzzle.solution}
        if not isinstance(puzzle, Sudoku):
            assert not any(puzzle.is_solved_by(other) for other in others)


def test_make_puzzles_depend_on_seed_and_part_only():
    def questions(seed, part):
        return [puzzle.question for puzzle in islice(make_puzzles(seed, part, list(KINDS), "easy"), 12)]

    assert questions(0, "train") == questions(0, "train")
    assert len({tuple(questions(*args)) for args in ((0, "train"), (1, "train"), (0, "eval"))}) == 3


@pytest.mark.parametrize(
    ("puzzle", "right", "wrong"),
    [
        (
            COUNTDOWN,
            ["3 * 6", "(6) * 3", " 6 * 3 "],
            [
                "18",
                "6 * 3 + 0",
                "3 * 3 * 2",
                "6 * 6 - 18",
                "2 * 9",
                "",
                "6 ** 3",
                "__import__('os')",
                "6 / 0",
                "(" * 150,
                "9" * 199,
                "6 if 3 else 4",
                "-" * 199 + "6",
                "True * 18",
                "6 * 3\n+0",
            ],
        ),
        (
            SUDOKU,
            ["1234\n3412\n2143\n4321", "1234341221434321", "1 2 3 4 | 3 4 1 2 | 2 1 4 3 | 4 3 2 1"],
            ["1234\n3421\n2143\n4321", "4321\n3412\n2143\n1234", "1234", "", "\u0661" * 16, "1" * 16, "1234" * 400],
        ),
        (
            KNIGHTS,
            ["Ada knight, Ben knave", "Ben is a knave\nAda is a knight", "ada: Knight; ben = knave"],
            ["Ada knight", "Ada knight, Ada knave, Ben knave, Ben knight", "Ada knave, Ben knight", "knight knave", ""],
        ),
        (
            ORDERING,
            ["Cleo, Ben, Ada", "cleo ben ada", "Cleo > Ben > Ada"],
            ["Ada, Ben, Cleo", "Cleo, Ben", "Cleo Ben Ada Ada", "1. Cleo 2. Ben 3. Ada", ""],
        ),
    ],
    ids=["countdown", "sudoku", "knights", "ordering"],
)
def test_is_solved_by_accepts_solutions_only(puzzle, right, wrong):
    assert [answer for answer in right if not puzzle.is_solved_by(answer)] == []
    assert [answer for answer in wrong if puzzle.is_solved_by(answer)] == []


@settings(max_examples=40)
@given(st.sampled_from([COUNTDOWN, SUDOKU, KNIGHTS, ORDERING]), st.text(max_size=300))
def test_is_solved_by_never_raises(puzzle, answer):
    assert puzzle.is_solved_by(answer) in (True, False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"kind": "chess"}, "not one of countdown"),
        ({"numbers": [1, 2], "target": 99}, "no combination"),
        ({"numbers": ["1"], "target": 1}, "list of int"),
        ({"numbers": [1] * 7, "target": 1}, "at most 6"),
        ({"kind": "sudoku", "grid": "12"}, "16 characters"),
        ({"kind": "sudoku", "grid": "11" + "." * 14}, "no solution"),
        ({"kind": "knights", "statements": [["Ada", "is", "Ben", "spy"]]}, "a statement is"),
        ({"kind": "knights", "statements": [["Ada", "is", "Ada", "knight"]]}, "2 solutions"),
        ({"kind": "ordering", "names": ["A", "B"], "clues": [["A", "before", "C"]]}, "a clue is"),
        ({"kind": "ordering", "names": ["A", "B", "C"], "clues": [["A", "before", "B"]]}, "3 solutions"),
    ],
)
def test_read_puzzle_malformed_row_raises(row, message):
    with pytest.raises(ValueError, match=message):
        read_puzzle(row)


@pytest.mark.parametrize("args", [{"kinds": ["chess"]}, {"kinds": []}, {"level": "absurd"}, {"num_generated": 0}])
def test_load_environment_invalid_arguments_raise(args):
    with pytest.raises(ValueError, match=r"kind|level"):
        load_environment(**args)


def test_rewards_of_right_wrong_and_hostile_replies(tmp_path):
    path = tmp_path / "puzzles.jsonl"
    path.write_text(json.dumps({"kind": "countdown", "numbers": [3, 4, 6], "target": 18}) + "\n")
    env = vf.load_environment("logic", data_path=str(path))
    [row] = env.get_dataset()
    replies = {
        "<answer>6 * 3</answer>": 1,
        "<think>no <answer>1</answer></think> so <answer>6 * 3</answer>": 1,
        "<answer>1</answer> no: <answer>6*3</answer>": 1,
        "<answer>6 * 3</answer> or <answer>1</answer>": 0,
        "<think><answer>6 * 3</answer>": 0,
        "6 * 3": 0,
        "<answer>6 * 3": 0,
        "</answer>6 * 3<answer>": 0,
        "<answer>" * 5000: 0,
        "": 0,
    }
    assert scores(env, row, list(replies)) == list(replies.values())
    assert isinstance(env.get_eval_dataset()[0]["prompt"], list)
    assert isinstance(COUNTDOWN, Countdown)
