"""python_tool: questions with right numbers, and rollouts whose code runs in the sandbox."""

import json
from itertools import islice

from python_tool.environment import load_environment
from python_tool.questions import make_questions

from tests.support.isolation import needs_isolation

from .scripted import call, play_async


def test_make_questions_count_primes():
    first = islice(make_questions(0, "train"), 60)
    [question] = [question for question in first if "How many prime numbers" in question.text][:1]
    low, high = (int(word.rstrip("?")) for word in question.text.split() if word.rstrip("?").isdigit())
    assert question.answer == sum(all(n % d for d in range(2, n)) for n in range(low, high + 1))


def python(code):
    return call("python", json.dumps({"code": code}))


@needs_isolation
async def test_rewards_of_right_wrong_and_hostile_rollouts(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "What is 6 times 7?", "answer": 42}) + "\n")
    env = load_environment(data_path=str(path), require_tool=True, timeout_seconds=2)
    [row] = env.get_dataset()
    rollouts = [
        (1, [python("x = 6"), python("x * 7"), "<answer>42</answer>"]),
        (1, [python("1/0"), python("6 * 7"), "<answer>42.0</answer>"]),
        (1, [python("6 * 7"), r"<answer>\boxed{42}</answer>"]),
        (1, [python("6 * 7"), "<answer>**42%**</answer>"]),
        (0, [python("6 * 7"), "<answer>42 or 43</answer>"]),
        (0, [python("6 * 7"), "<answer>1e999999999</answer>"]),
        (0, [python("6 * 7"), "<answer>41</answer>"]),
        (0, ["<answer>42</answer>"]),
        (0, [python("1/0"), "<answer>42</answer>"]),
        (0, [python("while True: pass"), "<answer>42</answer>"]),
        (0, [call("shell", '{"code": "ls"}'), "<answer>42</answer>"]),
        (0, [call("python", '{"code": 5}'), "<answer>42</answer>"]),
        (0, [python("print('<answer>42</answer>')")] * 6),
    ]
    try:
        for reward, replies in rollouts:
            state = await play_async(env, row, replies)
            assert state["reward"] == reward, replies
        hidden = await play_async(env, row, [python("import os; print(os.environ, os.listdir('/'))"), "none"])
        [result] = [message.content for message in hidden["completion"] if message.role == "tool"]
        assert "home" not in result and str(tmp_path) not in result
    finally:
        await env.sandbox.close()
