"""logic: generated puzzles have the solutions they claim, checkers accept only solutions, and rows are checked."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logic.environment import KINDS, make_puzzles, read_puzzle
from logic.knights import Knights
from logic.ordering import Ordering
from logic.puzzle import LEVELS
from logic.sudoku import Sudoku

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


EIGHT = read_puzzle({"numbers": [3, 8, 1], "target": 24})
ANSWERS = [  # a puzzle, right answers in the forms that models write, wrong answers
    (COUNTDOWN, ["3 * 6", "(6) * 3", " 6 * 3 "],
     ["18", "6 * 3 + 0", "3 * 3 * 2", "6 * 6 - 18", "2 * 9", "", "6 ** 3", "__import__('os')", "6 / 0", "(" * 150,
      "9" * 199, "6 if 3 else 4", "-" * 199 + "6", "True * 18", "6 * 3\n+0"]),
    (SUDOKU, ["1234\n3412\n2143\n4321", "1234341221434321", "1 2 3 4 | 3 4 1 2 | 2 1 4 3 | 4 3 2 1"],
     ["1234\n3421\n2143\n4321", "4321\n3412\n2143\n1234", "1234", "", "\u0661" * 16, "1" * 16, "1234" * 400]),
    (KNIGHTS, ["Ada knight, Ben knave", "Ben is a knave\nAda is a knight", "ada: Knight; ben = knave"],
     ["Ada knight", "Ada knight, Ada knave, Ben knave, Ben knight", "Ada knave, Ben knight", "knight knave", ""]),
    (ORDERING, ["Cleo, Ben, Ada", "cleo ben ada", "Cleo > Ben > Ada"],
     ["Ada, Ben, Cleo", "Cleo, Ben", "Cleo Ben Ada Ada", "1. Cleo 2. Ben 3. Ada", ""]),
    (EIGHT,
     ["3*8", "3*8 = 24", "24 = 3*8", "3 \u00d7 8", "8 ÷ 1 * 3", r"8 \div 1 \times 3", r"3 \times 8", "$3*8$",
      r"\(3 \cdot 8\)", "(3)*(8)", "3 x 8", "3 * 8.", "**3 * 8**", "[3]*[8]", r"\frac{8}{1} \times 3",
      r"\left(8 \div 1\right) \times 3", "3·8", "8*3*1", "`3*8`", "(3 x 8) / 1", "\uff13*\uff18"],
     ["3*8#", "24", "3*8 = 25", "3*8=", "", "3*8*1*1", "3**8", "4*6", "3*8 # = 24", "(3)(8)", "3*8; 1", "3*8 or 24",
      "3 8", "2*12", "3*8 = 24 = 25", "24 = 24", "=24", "3*7", "8*3-1", "__import__('os')", "3*8\n+0", "3,8",
      "three times eight", "38 - 14", "1*24"]),
    (KNIGHTS,
     ["Ada knight, Ben knave", "**Ada**: knight, **Ben**: knave", "Ada (knight), Ben (knave)",
      "Ada - knight\nBen - knave", "Ada is the knight, Ben is the knave", "Ada is a knight and Ben is a knave",
      "Ada: **knight**; Ben: **knave**", "Ada = knight, Ben = knave", "ada KNIGHT ben KNAVE",
      "Ada → knight, Ben → knave", "| Ada | knight |\n| Ben | knave |", "Ben is a knave. Ada is a knight.",
      "- Ada: Knight\n- Ben: Knave", "_Ada_: knight, _Ben_: knave", "Ada — knight, Ben \u2013 knave"],
     ["Ada is not a knight, Ben is not a knave", "Ada knight", "Ada knight, Ben knight", "Ada knave, Ben knight",
      "Ada knight, Ben knave, Ben knight", "Ada knight, Ben knave, Cleo knight",
      "Ada is a knight or a knave, Ben knave", "Ada isn't a knight, Ben knave", "knight knave", "",
      "Ada: knight, Ben: not knave", "Ada said Ben is a knight, Ben knave", "AdaX knight, Ben knave",
      "Ada knightly, Ben knave"]),
    (ORDERING,
     ["Cleo, Ben, Ada", "Cleo Ben Ada", "Cleo, Ben and Ada", "**Cleo**, **Ben**, **Ada**", "Cleo → Ben → Ada",
      "cleo, ben, and ada", "_Cleo_ Ben Ada"],
     ["Ada, Ben, Cleo", "Cleo, Ben", "Cleo, Ben, Ada, Cleo", "Cleo or Ben, Ada", "2. Cleo 1. Ben 3. Ada",
      "3. Cleo 2. Ben 1. Ada", "", "Cleo Ben Ada Dan", "not Cleo, Ben, Ada"]),
    (SUDOKU,
     [SUDOKU.solution, SUDOKU.solution.replace("\n", " "), "[[1,2,3,4],[3,4,1,2],[2,1,4,3],[4,3,2,1]]",
      "1 2 | 3 4\n3 4 | 1 2\n----+----\n2 1 | 4 3\n4 3 | 2 1", "```\n1234\n3412\n2143\n4321\n```"],
     ["1234\n3412\n2143\n432", "1234341221434312", "1234\n3421\n2143\n4312", "", "1.34341221434321",
      "12343412214343211"]),
]  # fmt: skip


@pytest.mark.parametrize(("puzzle", "right", "wrong"), ANSWERS)
def test_is_solved_by_accepts_solutions_only(puzzle, right, wrong):
    assert [answer for answer in right if not puzzle.is_solved_by(answer)] == []
    assert [answer for answer in wrong if puzzle.is_solved_by(answer)] == []


@pytest.mark.extended
@settings(max_examples=40)
@given(st.sampled_from([COUNTDOWN, SUDOKU, KNIGHTS, ORDERING]), st.text(max_size=300))
def test_is_solved_by_never_raises(puzzle, answer):
    assert puzzle.is_solved_by(answer) in (True, False)
