"""Questions of any file, graded by name or by a user's function."""

import json
import time
from pathlib import Path

import pytest
from dataset import load_environment
from dataset.graders import make_grader
from datasets import Dataset

from .scripted import play, scores

CSV = str(Path(__file__).parent / "fixtures" / "questions.csv")
ROWS = [
    {"question": "What is 2 + 3?", "answer": "5", "level": 1},
    {"question": "How many legs, in total, do two spiders have?", "answer": "16", "level": 2},
]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file of a name and return its path."""
    monkeypatch.chdir(tmp_path)

    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return written


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_rows_of_every_format_are_equal(suffix, write):
    path = CSV
    if suffix == "jsonl":
        path = write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    elif suffix == "json":
        path = write("rows.json", json.dumps(ROWS))
    elif suffix == "parquet":
        path = "rows.parquet"
        Dataset.from_list(ROWS).to_parquet(path)
    rows = load_environment(data_path=path, info_columns=["level"], grader="number", system_prompt="Be brief.")
    first, second, *_ = rows.get_dataset()
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert [message["content"] for message in first["prompt"]] == ["Be brief.", "What is 2 + 3?"]
    assert (second["prompt"][1]["content"], second["answer"]) == (ROWS[1]["question"], "16")
    assert str(first["info"]["level"]) == "1"


def test_row_of_a_csv_file_may_have_several_lines():
    env = load_environment(data_path=CSV, grader="number")
    assert env.get_dataset()[2]["prompt"][0]["content"] == "A row over\ntwo lines: what is 7 - 9?"


@pytest.mark.parametrize(
    "grader, answer, right, wrong",
    [
        ("exact", "two words", ["two words", " two\n words ", "<think>no</think>two words", r"so \boxed{two words}"],
         ["", "Two words", "two words.", "<think>two words"]),
        ("exact", r"so \boxed{7}", [r"\boxed{7}", "7", r"so \boxed{7}"], ["8", ""]),
        ("exact", "<think>a</think>7", ["7", "<think>a</think>7"], ["8", ""]),
        ("contains", r"<think>8</think> \boxed{7}", ["it is 7", "<think>a</think>7"], ["8", ""]),
        ("contains", "New York", ["in new  york.", "NEW YORK"], ["", "York New", "anew york", "new yorkers"]),
        ("contains", "3", ["it is 3", "x=3."], ["13", "31", "-3", "0.3", "3.5", "3,000", "3/4", "√3", "3^2"]),
        ("contains", "C", ["I use C."], ["C++", "C#"]),
        ("contains", "can", ["I can"], ["I can't"]),
        ("contains", ".*", ["the pattern .*"], ["anything"]),
        ("number", "1,234.5", ["so $1234.50", r"\boxed{1234.5}", r"\boxed{2469/2}"], ["", "1234", "1234.5 or 6"]),
        ("number", "1/3", [r"\boxed{\frac{1}{3}}", "It is 1/3."], ["3", "1", "0.33"]),
        ("number", "5 apples", [r"\boxed{5 \text{ apples}}", "5"], ["10 - 5", "5 million"]),
        ("number", "3 + 4\n#### 7", ["7"], ["3"]),
        ("number", r"\boxed{7}", ["7"], ["8"]),
        ("number", "<think>8</think>7", ["7"], ["8"]),
        ("letter", r"\boxed{C}", ["C"], ["B"]),
        ("letter", "<think>B</think>C", ["C"], ["B"]),
        ("letter", "(c)", ["Answer: C", r"\boxed{c}", "C"], ["", "Answer: B", "a, b, c, d and e"]),
    ],
)  # fmt: skip
def test_grader_rewards_only_right_replies(grader, answer, right, wrong, write):
    env = load_environment(
        data_path=write("row.json", json.dumps([{"question": "What?", "answer": answer}])), grader=grader
    )
    row = env.get_dataset()[0]
    assert scores(env, row, right) == [1] * len(right)
    assert scores(env, row, wrong) == [0] * len(wrong)


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": ""}])
def test_rows_without_a_grader_need_no_answer_and_have_no_reward(answer, write):
    env = load_environment(data_path=write("rows.json", json.dumps([{"question": "What?", **answer}])), grader="none")
    row = env.get_dataset()[0]
    assert (row["answer"], scores(env, row, ["This."])) == ("", [0])
    assert "correct_answer" not in play(env, row, ["This."])["metrics"]


@pytest.mark.slow
def test_math_grader_compares_values_and_releases_its_processes(write):
    env = load_environment(data_path=write("row.json", json.dumps([ROWS[0] | {"answer": r"\boxed{\frac{1}{2}}"}])),
                           grader="math")  # fmt: skip
    row = env.get_dataset()[0]
    assert scores(env, row, [r"\boxed{0.5}", r"\boxed{2/4}", r"\boxed{0.6}", "0.5", r"\boxed{9^{9^{9^9}}}"]) == [
        1, 1, 0, 0, 0,
    ]  # fmt: skip
    played = [play(env, row, [reply]) for reply in (r"\boxed{0.6}", r"\boxed{9^{9^{9^9}}}")]
    assert [state["metrics"]["grading_failed"] for state in played] == [0, 1]


@pytest.mark.parametrize("definition", ["def", "async def"])
def test_own_function_of_the_working_directory_grades(definition, write):
    name = f"my_grader_{len(definition)}"
    write(f"{name}.py", f"{definition} length(text, answer):\n    return len(text) / int(answer)\n")
    env = load_environment(data_path=CSV, grader=f"{name}:length")
    assert scores(env, env.get_dataset()[0], ["abc", ""]) == [0.6, 0.0]


def test_choices_are_added_to_the_question_and_an_index_becomes_a_letter(write):
    rows = [
        {"question": "Which?", "choices": ["x", "y"], "answer": 1},
        {"question": "Which?", "choices": ["x", "y", "z"], "answer": "C"},
    ]
    env = load_environment(data_path=write("rows.json", json.dumps(rows)), choices_column="choices", grader="letter")
    assert env.get_dataset()[0]["prompt"][0]["content"] == "Which?\nA) x\nB) y"
    assert env.get_dataset()["answer"] == ["B", "C"]


@pytest.mark.parametrize(
    "name, text, arguments, message",
    [
        ("a.csv", "question,answer\nWhat?\n", {}, "a.csv, row 1: 1 values for 2 columns; quote text with commas"),
        ("a.csv", "question,answer\n", {}, "a.csv has no rows"),
        ("a.csv", "", {}, "a.csv has no rows"),
        ("a.csv", "answer,answer\n1,2\n", {}, "a.csv has two columns 'answer'"),
        ("a.csv", 'question,answer\n"What?,1\n', {}, "a.csv, line 2: not CSV"),
        ("a.csv", "prompt,answer\nWhat?,1\n", {}, "a.csv, row 1: no 'question'; it has 'prompt', 'answer'"),
        ("a.csv", "question,answer\nWhat?,one\n", {"grader": "number"}, "row 1: the answer is not one number: 'one'"),
        ("a.csv", "question,answer\nWhat?,F\n", {"grader": "letter"}, "row 1: the answer is not one of the letters"),
        ("a.csv", "question,answer\nWhat?,NaN\n", {"grader": "number"}, "row 1: the answer is not one number: 'NaN'"),
        ("a.json", '[{"question": "?", "answer": Infinity}]', {}, "row 1: 'answer' is not text but inf"),
        ("a.csv", "question,answer\nWhat?,<think>a\n", {}, "row 1: the answer is only reasoning or an empty box"),
        ("a.csv", "question,answer\nWhat?,\\boxed{}\n", {}, "row 1: the answer is only reasoning or an empty box"),
        ("a.csv", "question,answer\nWhat?,F\n", {"info_columns": ["level"]}, "row 1: no 'level'"),
        ("a.csv", "question,answer,c\nWhat?,0,x\n", {"choices_column": "c"}, "row 1: 'c' is not a list of at most 5"),
        ("a.json", '[{"question": "?", "answer": 3, "c": ["x"]}]', {"choices_column": "c"}, "choice 3, counted from 0"),
        ("a.json", '[{"question": [{"role": "bot", "content": "?"}], "answer": 3}]', {}, "has the role 'bot'; the"),
        ("a.json", '[{"question": [{"role": "user", "content": "\\ud800"}], "answer": 3}]', {},
         "has half of a character"),
        ("a.json", '[{"question": "?", "answer": "C", "c": ["x"]}]', {"choices_column": "c"}, "C, but there are"),
        ("a.json", '[{"question": "?", "answer": 0, "c": ["x", null]}]', {"choices_column": "c"}, "no 'c': it is null"),
        ("a.json", '[{"question": [{"role": "user", "content": "?"}], "answer": 0, "c": ["x"]}]',
         {"choices_column": "c"}, "to which no choices can be added"),
        ("a.json", '[{"question": [{"role": "user", "content": "?", "tool_calls": [1]}], "answer": 3}]', {},
         "a message with tool calls"),
        ("a.json", f'[{{"question": "?", "answer": 3, "c": {2**70}}}]', {"info_columns": ["c"]}, "info_columns: a"),
        ("a.parquet", "nothing", {}, "a.parquet is not a Parquet file"),
        ("a.csv", "question,answer\n?,1\n", {"grader": "best"}, "grader = 'best' is none of exact, contains, number"),
        ("a.csv", "question,answer\n?,1\n", {"grader": "no:f"}, "grader = 'no:f' cannot be imported"),
        ("a.csv", "question,answer\n?,1\n", {"dataset_name": "x/y"}, "set one of data_path"),
    ],
)  # fmt: skip
def test_malformed_data_or_arguments_are_one_line(name, text, arguments, message, write):
    with pytest.raises(ValueError) as caught:
        load_environment(data_path=write(name, text), **arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_are_refused_as_info(tmp_path):
    rows = [{"question": "What?", "answer": "5", "image": {"bytes": b"\xff", "path": None}}]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    load_environment(data_path=str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match="row 1: 'image' contains bytes, such as an image; leave it out"):
        load_environment(data_path=str(tmp_path / "a.parquet"), info_columns=["image"])


@pytest.mark.parametrize("grader", ["exact", "contains", "number", "letter"])
async def test_reply_of_a_million_characters_is_graded_fast(grader):
    start = time.process_time()
    for text in ("a " * 500_000, " " * 10**6, r"\boxed{" * 140_000, "1," * 500_000, "C" * 10**6):
        assert await make_grader(grader).grade(text, "7" if grader == "number" else "b") == 0
    assert time.process_time() - start < 5


def test_reply_is_a_conversation_of_one_turn():
    env = load_environment(data_path=CSV, grader="number")
    assert play(env, env.get_dataset()[0], ["5"])["metrics"]["correct_answer"] == 1
