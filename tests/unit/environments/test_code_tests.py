"""code_tests: which part of a reply is its code, forms of problems, and rewards for hostile replies."""

import base64
import json
import pickle
import shutil
import zlib
from typing import Any

import pytest
import verifiers as vf

from prime_rl.sandbox.execution import ExecutionResult, SandboxError, Verdict

from .scripted import play_async

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
CODE = "```python\n{}\n```"
PRIVATE = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "2", "output": "4", "testtype": "functional"}])))
).decode()
ROWS: dict[str, dict[str, Any]] = {
    "humaneval": {
        "prompt": 'from typing import List\n\n\ndef double(x: int) -> int:\n    """Twice x."""\n',
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0",
    },
    "mbpp": {"text": "Write double(x).", "test_list": ["assert double(1) == 2", "assert abs(double(2)) == 4"]},
    "apps": {"question": "double?", "input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})},
    "apps calls": {
        "question": "double?",
        "input_output": json.dumps({"fn_name": "double", "inputs": [[1], [2]], "outputs": [[2], [4]]}),
    },
    "livecodebench": {
        "question_content": "double?",
        "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}] * 2),
    },
    "livecodebench functional": {
        "question_content": "double?",
        "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "functional"}]),
        "private_test_cases": PRIVATE,
        "metadata": json.dumps({"func_name": "double"}),
        "starter_code": "class Solution:\n    def double(self, x):",
    },
    "humaneval+": {
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "entry_point": "double",
        "test": "import numpy as np\n\ndef check(candidate):\n    assert np.allclose(candidate(2.0), 4.0)\n"
        "    assert np.allclose([candidate(1)], [2], rtol=1e-07, atol=1e-6)\n"
        "    assert not np.allclose(candidate(1), 3)\n",
    },
    "own": {
        "question": "double?",
        "tests": [{"function": "double", "args": [4], "expected": 8}, {"input": "1", "output": "2"}],
    },
}
DOUBLE = "def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(double(int(input())))"
FAKES = [
    "import os; os._exit(0)",
    "class A(int):\n    def __eq__(self, other): return True\ndef double(x): return A(1)",
    "import builtins\nbuiltins.AssertionError = Exception\ndouble = lambda x: None",
    "def double(x):\n    while True: pass\ndouble(1)",
    "def double(x: return 1",
    "raise SystemExit(0)",
]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na\n```\ntext\n```py\nb\n```\nmore", "b\n"),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b\n"),
        ("<think>```python\na\n```", None),
        ("```python\na = 1", None),
        ("a = 1", None),
        ("", None),
        ("```" * 7000, None),
    ],
)
def test_extract_code_takes_the_last_block_after_the_reasoning(reply, code):
    from code_tests.scoring import extract_code

    assert extract_code(reply) == code


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "no tests"),
        ({"text": "x", "test_list": ["assert True"]}, "calls no function"),
        ({"text": "x", "test_list": ["assert ("]}, "not Python"),
        ({"question": "x", "tests": [{"args": [1], "expected": 1}]}, "needs `function`"),
        ({"question": "x", "tests": [{"input": "1"}]}, "needs `output`"),
        ({"question": "x", "tests": "{broken"}, "Expecting"),
        ({"question": "x", "tests": [1]}, "malformed tests"),
        ({"question": "x", "input_output": {"inputs": []}}, "malformed tests"),
        ({"question": "x", "tests": [{"function": "f()", "args": [], "expected": 1}]}, "no name of a function"),
        ({"question": "x", "public_test_cases": "[]", "private_test_cases": "AAAA"}, "neither JSON nor"),
        ({"question": "x", "public_test_cases": '[{"testtype": "functional", "input": "1"}]'}, "needs `func_name`"),
    ],
)
def test_read_problem_malformed_row_raises(row, message):
    from code_tests.problems import read_problem

    with pytest.raises(ValueError, match=message):
        read_problem(row)


def test_make_problems_in_notation_have_small_questions_and_solutions():
    from code_tests.problems import make_problems

    problems = list(make_problems(0, "train", 50, "notation"))
    assert max(len(problem.question) for problem in problems) <= len("f(x)=100x-100")
    for problem in problems:
        factor, summand = problem.question.removeprefix("f(x)=").replace("-", "+-").split("x+")
        assert [int(factor) * case.args[0] + int(summand) for case in problem.cases] == [
            case.expected for case in problem.cases
        ]


def test_make_problems_depend_on_seed_and_part_only():
    from code_tests.problems import make_problems

    first = list(make_problems(1, "train", 20))
    assert first == list(make_problems(1, "train", 20))
    assert first != list(make_problems(2, "train", 20))
    assert first != list(make_problems(1, "eval", 20))
    assert {bool(problem.cases[0].function) for problem in first} == {True, False}


@pytest.mark.parametrize("args", [{"reward": "some"}, {"style": "poem"}, {"timeout_ms": 0}, {"max_tests": 0}])
def test_load_environment_invalid_arguments_raise(args):
    with pytest.raises(RuntimeError, match=next(iter(args))):
        vf.load_environment("code_tests", **args)


def test_load_environment_without_bubblewrap_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="apt-get install bubblewrap"):
        vf.load_environment("code_tests", num_generated=1)


@needs_bubblewrap
def test_load_environment_rows_hold_no_tests(tmp_path):
    env = load_rows(tmp_path, ROWS["apps"] | {"input_output": json.dumps({"inputs": ["1"], "outputs": ["sentinel"]})})
    assert "sentinel" not in json.dumps(list(env.get_dataset()))
    assert "sentinel" not in json.dumps(list(env.get_eval_dataset()))


def load_rows(folder, *rows, **args):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return vf.load_environment("code_tests", data_path=str(path), **args)


@needs_bubblewrap
async def test_rewards_of_right_wrong_and_hostile_replies(tmp_path):
    env = load_rows(tmp_path, *ROWS.values(), timeout_ms=3000)
    strict = load_rows(tmp_path, ROWS["apps"], reward="all")
    try:
        for row in env.get_dataset():
            right = await play_async(env, row, [CODE.format(DOUBLE)])
            assert right["reward"] == 1, row
            metrics = right["metrics"]
            assert (metrics["compiled"], metrics["timeouts"]) == (1, 0)
            assert metrics["passed_tests"] >= 1
            assert metrics["sandbox_ms"] > 0
        row = env.get_dataset()[1]
        for fake in FAKES:
            assert (await play_async(env, row, [CODE.format(fake)]))["reward"] == 0, fake
        assert (await play_async(env, row, ["no code"]))["reward"] == 0
        broken = await play_async(env, row, [CODE.format("def double(x: return 1")])
        assert broken["metrics"]["compiled"] == 0
        half = CODE.format("print(2)")
        assert (await play_async(env, env.get_dataset()[2], [half]))["reward"] == 0.5
        assert (await play_async(strict, strict.get_dataset()[0], [half]))["reward"] == 0
    finally:
        await env.sandbox.close()
        await strict.sandbox.close()


@needs_bubblewrap
async def test_reward_of_a_method_of_a_class_solution(tmp_path):
    env = load_rows(tmp_path, ROWS["livecodebench functional"], ROWS["apps calls"])
    try:
        for row in env.get_dataset():
            code = "class Solution:\n    def double(self, x):\n        return 2 * x"
            assert (await play_async(env, row, [CODE.format(code)]))["metrics"]["passed_tests"] == 2
    finally:
        await env.sandbox.close()


@needs_bubblewrap
async def test_generated_problems_can_be_solved():
    env = vf.load_environment("code_tests", num_generated=8)
    try:
        for row in env.get_dataset().select(range(4)):
            question = row["prompt"][-1]["content"]
            factor, summand = (int(word.rstrip(".")) for word in question.split() if word.rstrip(".").isdigit())
            body = f"def f(x): return {factor} * x + {summand}"
            code = body if "function" in question else f"{body}\nprint(f(int(input())))"
            assert (await play_async(env, row, [CODE.format(code)]))["reward"] == 1
    finally:
        await env.sandbox.close()


@needs_bubblewrap
async def test_sandbox_that_fails_raises_and_is_no_reward_of_0(tmp_path, monkeypatch):
    from code_tests.problems import read_problem
    from code_tests.scoring import grade

    env = load_rows(tmp_path, ROWS["apps"])
    try:
        sandbox = await env.sandbox.open()

        async def run(request):
            return ExecutionResult(Verdict.INFRA, stderr="lost")

        monkeypatch.setattr(sandbox._pool, "run", run)
        with pytest.raises(SandboxError, match="lost"):
            await grade(sandbox, CODE.format(DOUBLE), read_problem(ROWS["apps"]), 1000, 5)
    finally:
        await env.sandbox.close()
