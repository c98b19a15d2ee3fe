"""science: units, tolerances and choices; forms of rows; rewards of hostile replies."""

import json
from itertools import islice

import pytest
import verifiers as vf
from hypothesis import given
from hypothesis import strategies as st
from science.environment import load_environment
from science.facts import FACTS
from science.formulas import FORMULAS
from science.questions import KINDS, make_questions, read_question
from science.units import parse_quantity

from .scripted import scores


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("3.2 m/s", 3.2, (1, 0, -1, 0, 0, 0)),
        ("11.52 km/h", 3.2, (1, 0, -1, 0, 0, 0)),
        ("1.5e3 kg*m^2/s^2", 1500, (2, 1, -2, 0, 0, 0)),
        ("1.5 kJ", 1500, (2, 1, -2, 0, 0, 0)),
        ("4.2 x 10^-3 mol", 0.0042, (0, 0, 0, 0, 0, 1)),
        ("4.2 \u00d7 10⁻³ mol", 0.0042, (0, 0, 0, 0, 0, 1)),
        ("20 °C", 293.15, (0, 0, 0, 0, 1, 0)),
        ("8.314 J/(mol*K)", 8.314, (2, 1, -2, 0, -1, -1)),
        ("8.314 J/mol/K", 8.314, (2, 1, -2, 0, -1, -1)),
        ("8.314 J mol^-1 K^-1", 8.314, (2, 1, -2, 0, -1, -1)),
        ("1,234.5 kΩ", 1234500, (2, 1, -3, -2, 0, 0)),
        ("5 min", 300, (0, 0, 1, 0, 0, 0)),
        ("2 mm²", 2e-6, (2, 0, 0, 0, 0, 0)),
        ("50%", 0.5, (0, 0, 0, 0, 0, 0)),
        ("-.5", -0.5, (0, 0, 0, 0, 0, 0)),
    ],
)
def test_parse_quantity_reads_numbers_with_units(text, value, dimension):
    quantity = parse_quantity(text)
    assert quantity.value == pytest.approx(value)
    assert quantity.dimension == dimension


@pytest.mark.parametrize(
    "text",
    ["", "m/s", "3 parsnips", "3 m^99", "1e400", "9e999 m", "3 4", "nan", "inf", "3 m" + "/m" * 60, "3 __class__"],
)
def test_parse_quantity_other_text_raises(text):
    with pytest.raises(ValueError):
        parse_quantity(text)


@given(st.text(max_size=100) | st.text("0123456789.e+-x10^*/ ()kmsgµΩ°C%", max_size=80))
def test_parse_quantity_any_text_raises_value_error_at_most(text):
    try:
        assert abs(parse_quantity(text).value) < float("inf")
    except ValueError:
        return


def test_generated_questions_accept_their_answer():
    questions = list(islice(make_questions(0, "train", KINDS, 0.01), 300))
    assert all(question.is_correct(question.answer) for question in questions)
    assert len({question.text for question in questions}) > 200
    again = [question.text for question in islice(make_questions(0, "train", KINDS, 0.01), 300)]
    assert again == [question.text for question in questions]
    assert all(len({right, *wrong}) == 4 for _, right, *wrong in FACTS)
    assert len(FORMULAS) == 10


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        (
            {"question": "?", "answer": "3.2", "unit": "m/s"},
            ["3.2 m/s", "3.21 m/s", "11.52 km/h"],
            ["3.2", "3.3 m/s", "3.2 m"],
        ),
        ({"problem": "?", "answer": 10, "tolerance": 0}, ["10", "1e1"], ["10.01", "10 m"]),
        (
            {"question": "?", "choices": ["a", "b"], "answer": 1},
            ["B", "b", "(B)", "B) b"],
            ["A", "B) a", "AB", "C", "1", ""],
        ),
        ({"question": "?", "choices": ["x", "y"], "answer": "y"}, ["B", "y", "Y."], ["A", "x"]),
        (
            {"question": "?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
            ["B", "y"],
            ["A", "2"],
        ),
    ],
)
def test_read_question_forms_accept_right_answers_only(row, right, wrong):
    question = read_question(row, 0.01)
    assert [answer for answer in right if not question.is_correct(answer)] == []
    assert [answer for answer in wrong if question.is_correct(answer)] == []


@pytest.mark.parametrize(
    "names", [("Question", "Correct Answer", "Incorrect Answer 1"), ("question", "correct_answer", "distractor1")]
)
def test_read_question_shuffles_choices_by_the_question_alone(names):
    question, right, wrong = names
    letters = {read_question({question: f"{n}?", right: "x", wrong: "y"}, 0.01).answer for n in range(20)}
    assert letters == {"A", "B"}
    assert len({read_question({question: "1?", right: "x", wrong: "y"}, 0.01).text for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, "no 'question'"),
        ({"question": "?", "answer": "about three"}, "not a number"),
        ({"question": "?", "answer": "1", "tolerance": 2}, "tolerance"),
        ({"question": "?", "choices": ["a"], "answer": 0}, "of 1 choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": "c"}, "none of the choices"),
        ({"question": "?", "choices": ["a", "b"]}, "none of the choices"),
        ({"question": "?", "choices": "ab", "answer": 0}, "must be a list"),
    ],
)
def test_read_question_malformed_row_raises(row, message):
    with pytest.raises(ValueError, match=message):
        read_question(row, 0.01)


@pytest.mark.parametrize("args", [{"kinds": ["poems"]}, {"kinds": []}, {"tolerance": 1}, {"num_generated": 0}])
def test_load_environment_invalid_arguments_raise(args):
    with pytest.raises(ValueError, match=next(iter(args))):
        load_environment(**args)


def test_rewards_of_right_wrong_and_hostile_replies(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "How fast?", "answer": "3.2 m/s"}) + "\n")
    env = vf.load_environment("science", data_path=str(path))
    replies = {
        "<answer>3.2 m/s</answer>": 1,
        "<think>a</think><answer> 11.52 km/h </answer>": 1,
        "<answer>3.2</answer>": 0,
        "<answer>A</answer>": 0,
        "3.2 m/s": 0,
        "<answer>" + "9" * 100_000 + "</answer>": 0,
        "": 0,
    }
    assert scores(env, env.get_dataset()[0], list(replies)) == list(replies.values())
    assert len(load_environment(num_generated=16).get_eval_dataset()) == 2
