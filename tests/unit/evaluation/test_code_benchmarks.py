"""`eval` where programs run: real workers, real sandbox, a scripted model.

`PRIME_RL_HUMANEVAL=humaneval.jsonl` uses the data set (164 problems) instead of our own problem of its form.
"""

import json
import os
from pathlib import Path

import pytest

from tests.support.fake_chat import calls, fake_chat, says
from tests.support.isolation import needs_isolation

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900), needs_isolation]

HUMANEVAL = [
    {
        "prompt": 'def double(x: int) -> int:\n    """Return twice x."""\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    }
]
MBPP = {"text": "Write half(x).", "test_list": ["assert half(4) == 2", "assert half(2) == 1"]}
LIVECODEBENCH = {
    "question_content": "Print the sum of two numbers.",
    "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
}
PROGRAMS = {"half(x)": "def half(x):\n    return x // 2\n", "sum of two": "print(sum(map(int, input().split())))\n"}


async def test_benchmarks_with_local_data_score_right_and_wrong_programs(evaluate, tmp_path):
    rows = HUMANEVAL
    if path := os.environ.get("PRIME_RL_HUMANEVAL"):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    data = tmp_path / "data"
    data.mkdir()
    for name, lines in (("humaneval", rows), ("mbpp", [MBPP]), ("livecodebench", [LIVECODEBENCH])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    programs = {row["prompt"].strip(): row["prompt"] + row["canonical_solution"] for row in rows} | PROGRAMS

    def solve(body):
        question = body["messages"][-1]["content"]
        return says(next(f"```python\n{program}```" for text, program in programs.items() if text in question))

    names = {"benchmarks": ["humaneval", "mbpp", "livecodebench"], "benchmark_data": data, "env": []}
    async with fake_chat() as server:
        server.reply = solve
        right = await evaluate(server.url, output_dir=tmp_path / "right", max_concurrent=16, **names)
        server.reply = lambda body: says("```python\nimport os; os._exit(0)\n```")
        wrong = await evaluate(server.url, output_dir=tmp_path / "wrong", max_concurrent=16, **names)
    assert [(result["env"], result["examples"], result["pass@1"]) for result in right] == [
        ("humaneval", len(rows), 1.0),
        ("mbpp", 1, 1.0),
        ("livecodebench", 1, 1.0),
    ]
    assert [result["pass@1"] for result in wrong] == [0, 0, 0]


async def test_python_tool_keeps_variables_between_turns(evaluate, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "6 times 7?", "answer": 42}) + "\n")
    programs = ["x = 6 * 7", "print(x)"]

    def compute(body):
        done = sum(message["role"] == "assistant" for message in body["messages"])
        if done < len(programs):
            return calls("python", code=programs[done])
        return says(f"<answer>{body['messages'][-1]['content']}</answer>")

    env = {"id": "python_tool", "args": {"data_path": str(tmp_path / "rows.jsonl")}}
    async with fake_chat() as server:
        server.reply = compute
        [result] = await evaluate(server.url, env=[env], seq_len=16384)
    assert result["reward/mean"] == 1
