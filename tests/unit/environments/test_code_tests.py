"""code_tests: which part of a reply is its code, forms of problems, and rewards for hostile replies."""

import base64
import json
import pickle
import re
import time
import zlib
from typing import Any

import pytest
import verifiers as vf
from code_tests.problems import make_problems, read_problem
from code_tests.scoring import extract_code, grade

from prime_rl_sandbox.execution import ExecutionResult, SandboxError, Verdict
from tests.support.isolation import hide_bubblewrap, needs_isolation

from .scripted import play_async

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
    "import os; os._exit(0)", "class A(int):\n    def __eq__(self, other): return True\ndef double(x): return A(1)",
    "import builtins\nbuiltins.AssertionError = Exception\ndouble = lambda x: None",
    "def double(x):\n    while True: pass\ndouble(1)", "def double(x: return 1", "raise SystemExit(0)",
]  # fmt: skip


BLOCKS = {  # code -> replies that contain it
    "a = 1\n": ["```python\na = 1\n```", "```python\r\na = 1\r\n```\r\n"],
    "b\n": [
        "```\na\n```\ntext\n```py\nb\n```\nmore", "<think>```python\na\n```</think>\n```python\nb\n```",
        "```python\na\n```python\nb\n```", "```\na\n```\n```\nb\n```",
    ],
    "a\n": [
        "~~~python\na\n~~~", "~~~\na\n~~~", "```python\na\n``` This works.", "```python\na\n```This works well.",
        "```python\na\n```\nOutput:\n```\n42\n```", "```python\na\n```\nOutput:\n```text\n42\n```",
        "```Python\na\n```", "```python3\na\n```", "```{.python}\na\n```", '```python title="x.py"\na\n```',
        "1. x\n   ```python\n   a\n   ```",
        "```python\na\n```\n```cpp\nx\n```", "```python\na\n````",
    ],
    "a\n```\nb\n": ["````python\na\n```\nb\n````", "~~~python\na\n```\nb\n~~~"],
    "a\n  b\n": ["  ```python\n  a\n    b\n  ```"],
    'def f():\n    """\n    ```\n    x\n    ```\n    """\n': [
        '```python\ndef f():\n    """\n    ```\n    x\n    ```\n    """\n```',
    ],
    "x\n": ["```cpp\nx\n```"],
    "": ["```python\n```"],
    "\n": ["```python\n\n```"],
    None: [
        "<think>```python\na\n```", "```python\na = 1", "a = 1", "", "```" * 7000, "````python\na\n```",
        "```print(1)```", "text ```python\na\n```",
    ],
}  # fmt: skip


def test_extract_code_takes_the_program_after_the_reasoning():
    assert [(text, code) for code, texts in BLOCKS.items() for text in texts if extract_code(text) != code] == []


@pytest.mark.parametrize(
    "first",
    [
        "def f(x): return x", "class Solution:\n    def f(self, x): return x", "f = lambda x: x", "async def f(): pass",
        "def  f(x): return x", "f: Callable = lambda x: x", "from operator import neg as f", "import heapq, math as f",
    ],
)  # fmt: skip
def test_extract_code_prefers_the_block_with_the_tested_function(first):
    reply = f"{CODE.format(first)}\nUsage:\n{CODE.format('print(f(2))')}"
    assert extract_code(reply, ["f"]) == first + "\n"
    assert extract_code(reply) == "print(f(2))\n"


def test_extract_code_hostile_replies_take_linear_time():
    start = time.process_time()
    for text in ("```\n" * 5000, " " * 20_000 + "```", "```" + " " * 20_000, "`" * 20_000, "~" * 20_000,
                 "```a\n" * 5000, "```python\n" + "def f(\n" * 2500 + "```"):  # fmt: skip
        extract_code(text, ["f"])
    assert time.process_time() - start < 2


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
    with pytest.raises(ValueError, match=message):
        read_problem(row)


def test_make_problems_in_notation_have_small_questions_and_solutions():
    problems = list(make_problems(0, "train", 50, "notation"))
    assert max(len(problem.question) for problem in problems) <= len("f(x)=100x-100")
    for problem in problems:
        factor, summand = problem.question.removeprefix("f(x)=").replace("-", "+-").split("x+")
        assert [int(factor) * case.args[0] + int(summand) for case in problem.cases] == [
            case.expected for case in problem.cases
        ]


def test_make_problems_in_sentences_have_the_solution_that_they_ask_for():
    for problem in make_problems(0, "train", 30):
        factor, summand = map(int, re.findall(r"(\d+) times .* plus (\d+)", problem.question)[0])
        for case in problem.cases:
            argument = case.args[0] if case.function else int(case.input)
            assert int(case.expected) == factor * argument + summand


def test_load_environment_without_bubblewrap_names_the_package(monkeypatch):
    hide_bubblewrap(monkeypatch)
    with pytest.raises(RuntimeError, match="apt-get install bubblewrap"):
        vf.load_environment("code_tests", num_generated=1)


@needs_isolation
def test_load_environment_rows_hold_no_tests(tmp_path):
    env = load_rows(tmp_path, ROWS["apps"] | {"input_output": json.dumps({"inputs": ["1"], "outputs": ["sentinel"]})})
    assert "sentinel" not in json.dumps(list(env.get_dataset()))
    assert "sentinel" not in json.dumps(list(env.get_eval_dataset()))


def load_rows(folder, *rows, **args):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return vf.load_environment("code_tests", data_path=str(path), **args)


@needs_isolation
async def test_rewards_of_right_wrong_and_hostile_replies(tmp_path):
    env = load_rows(tmp_path, *ROWS.values(), timeout_ms=10_000)
    fakes = load_rows(tmp_path, ROWS["mbpp"], timeout_ms=500)
    strict = load_rows(tmp_path, ROWS["apps"], reward="all")
    try:
        for row in env.get_dataset():
            right = await play_async(env, row, [CODE.format(DOUBLE)])
            assert right["reward"] == 1, row
            metrics = right["metrics"]
            assert (metrics["compiled"], metrics["timeouts"]) == (1, 0)
            assert metrics["passed_tests"] >= 1
            assert metrics["sandbox_ms"] > 0
        [row] = fakes.get_dataset()
        for reply in [*map(CODE.format, FAKES), "no code"]:
            assert (await play_async(fakes, row, [reply]))["reward"] == 0, reply
        broken = await play_async(fakes, row, [CODE.format("def double(x: return 1")])
        assert broken["metrics"]["compiled"] == 0
        half = CODE.format("print(2)")
        assert (await play_async(env, env.get_dataset()[2], [half]))["reward"] == 0.5
        assert (await play_async(strict, strict.get_dataset()[0], [half]))["reward"] == 0
    finally:
        for one in (env, fakes, strict):
            await one.sandbox.close()


TWO_SUM = (
    "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        seen = {}\n"
    "        for i, n in enumerate(nums):\n            if target - n in seen: return [seen[target - n], i]\n"
    "            seen[n] = i"
)


def functional(name, args, value):
    test = {"input": "\n".join(map(json.dumps, args)), "output": json.dumps(value), "testtype": "functional"}
    return {
        "question_content": "?",
        "public_test_cases": json.dumps([test]),
        "metadata": json.dumps({"func_name": name}),
        "starter_code": f"class Solution:\n    def {name}(self, a: List[int]) -> int:\n        ",
    }


def on_stdin(output):
    return {"question": "?", "tests": [{"input": "1000000000000000000", "output": output}]}


DOUBLING = "class Solution:\n    def double(self, x):\n        return 2 * x"
SUM_OF_TWO = functional("twoSum", [[2, 7, 11], 9], [0, 1])
GCD, SUM, BIG = functional("gcd", [12, 18], 6), functional("sum", [[1, 2]], 3), functional("big", [0], 1000000007)
GRADED = [
    (ROWS["livecodebench functional"], DOUBLING, 1),
    (ROWS["apps calls"], DOUBLING, 1),
    # Starter code that is completed runs with its imports.
    (SUM_OF_TWO, TWO_SUM, 1),
    (SUM_OF_TWO, "from __future__ import annotations\n" + TWO_SUM, 1),
    (SUM_OF_TWO, TWO_SUM.replace("seen = {}", "seen = defaultdict(int); heappush([], math.inf)"), 1),
    (SUM_OF_TWO, TWO_SUM.replace("seen = {}", "seen = {}; assert pow(2, 3, 5) == 3; open"), 1),
    (SUM_OF_TWO, "pass", 0),
    (functional("depth", [20_000], 20_000),
     "class Solution:\n    def depth(self, n): return n and 1 + self.depth(n - 1)", 1),
    (GCD, "x = 1", 0),
    (GCD, "class Solution:\n    def gcd(self, a, b): return gcd(a, b)", 1),
    (GCD, "def gcd(a, b): return a if b == 0 else gcd(b, a % b)", 1),
    (SUM, "class Solution:\n    def sum(self, a): return sum(a)", 1),
    (SUM, "x = 1", 0),
    (BIG, "class Solution:\n    def big(self, n): return 1000000006", 0),
    (BIG, "class Solution:\n    def big(self, n): return 1e9", 0),
    (BIG, "class Solution:\n    def big(self, n): return 10**9 + 7", 1),
    (functional("text", [0], "1011010011"), "class Solution:\n    def text(self, n): return '1011010000'", 0),
    # Integers and forms are compared exactly.
    (on_stdin("333333333333333333"), "print(int(input()) // 3)", 1),
    (on_stdin("333333333333333333"), "print(int(int(input()) / 3))", 0),
    (on_stdin("1000000007"), "print(1000000000.0)", 0),
    (on_stdin("1011010011"), "print(1011010000)", 0),
    (on_stdin("000000001"), "print(1)", 0),
    (on_stdin("9" * 400), "print('inf')", 0),
    (on_stdin("1 2\n3 4"), "print('1 2 3 4')", 0),
]  # fmt: skip


@needs_isolation
async def test_only_programs_that_pass_all_tests_of_their_row_are_rewarded(tmp_path):
    env = load_rows(tmp_path, *(row for row, _, _ in GRADED))
    try:
        for row, (_, code, reward) in zip(env.get_dataset(), GRADED, strict=True):
            assert (await play_async(env, row, [CODE.format(code)]))["reward"] == reward, (row["prompt"], code)
    finally:
        await env.sandbox.close()


@needs_isolation
async def test_sandbox_that_fails_raises_and_is_no_reward_of_0(tmp_path, monkeypatch):
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
