"""agentic: plans of at least twenty turns, and repairs that hidden tests accept."""

import importlib
import json
import sys
from collections import deque

import pytest
from agentic.environment import load_environment
from agentic.planning import make_tasks
from agentic.repositories import HiddenTest, make_repairs, read_repair
from agentic.repository_templates import TEMPLATES
from agentic.warehouse import ActionError, Situation, Warehouse, _fewest_actions, act, make_plan, num_delivered

from tests.support.isolation import needs_isolation

from .scripted import call, play, play_async

ARGUMENT = {"go": "room", "take": "thing"}


def as_call(step):
    action, argument = step
    return call(action, json.dumps({ARGUMENT[action]: argument} if action in ARGUMENT else {}))


def test_generated_plans_deliver_everything_in_the_promised_number_of_actions():
    tasks = make_tasks(0, "train", 30, 20, 36)
    for task in tasks:
        now = task.start
        for step in task.plan:
            assert num_delivered(task.world, now) < 3
            now = act(task.world, now, *step)
        assert num_delivered(task.world, now) == 3
        assert 20 <= len(task.plan) <= 36


def test_lower_bound_of_actions_holds_for_the_shortest_plan():
    doors = {"dock": ("hall",), "hall": ("dock", "lab"), "lab": ("hall",)}
    world = Warehouse(doors, "lab", {"red parcel": "lab"})
    start = Situation("dock", (("key", "dock"), ("red parcel", "dock")))
    shortest, queue = {start: 0}, deque([start])
    while num_delivered(world, now := queue.popleft()) < 1:
        steps = [("take", "key"), ("take", "red parcel"), ("drop", ""), ("unlock", "")]
        for step in [("go", room) for room in doors] + steps:
            try:
                after = act(world, now, *step)
            except ActionError:
                continue
            if after not in shortest:
                shortest[after] = shortest[now] + 1
                queue.append(after)
    assert _fewest_actions(world, start) <= shortest[now] == len(make_plan(world, start)) == 9


def test_planning_rollout_takes_a_turn_for_each_action():
    env = load_environment(num_generated=2)
    task, row = env.tasks[0], env.get_dataset()[0]
    plan = [as_call(step) for step in task.plan]
    state = play(env, row, plan)
    assert state["reward"] == 1 and len(state["trajectory"]) == len(plan) >= 20
    assert state["metrics"]["num_actions"] == len(plan)
    half = play(env, row, [*plan[:-1], "done"])
    assert half["reward"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("go", '{"room": "moon"}', "no door"),
        ("go", '{"room": ["hall"]}', "no door"),
        ("take", '{"thing": "' + "x" * 5000 + '"}', "there is no 'xxx"),
        ("unlock", "{}", "error: "),
        ("drop", "{}", "you carry nothing"),
        ("fly", "{}", "no such tool"),
        ("go", "{}", "room"),
        ("go", "not json", "error: "),
    ],
)
def test_planning_tools_answer_hostile_calls(name, arguments, message):
    env = load_environment(num_generated=1)
    state = play(env, env.get_dataset()[0], [call(name, arguments), "done"])
    [result] = [part.content for part in state["completion"] if part.role == "tool"]
    assert message in result and len(result) < 300
    assert state["reward"] == 0


def test_planning_second_call_of_a_reply_is_ignored():
    env = load_environment(num_generated=1)
    task = env.tasks[0]
    first = as_call(task.plan[0])
    second = as_call(task.plan[1])["tool_calls"][0].model_copy(update={"id": "d"})
    state = play(env, env.get_dataset()[0], [{"content": "", "tool_calls": [*first["tool_calls"], second]}, "done"])
    results = [part.content for part in state["completion"] if part.role == "tool"]
    assert results[0].startswith("You are") and "one call in each reply" in results[1]


def passes(namespace, test):
    try:
        return namespace[test.function](*test.args) == test.expected
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return False


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_defect_breaks_a_hidden_test_and_correct_code_none(template, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def results(files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()
        tests = [HiddenTest(*test) for test in template.tests]
        found = [passes(vars(importlib.import_module(test.module)), test) for test in tests]
        for name in files:
            sys.modules.pop(name.removesuffix(".py"), None)
        return found

    assert all(results(template.files))
    for path, right, wrong in template.defects:
        assert right in template.files[path], right
        broken = {**template.files, path: template.files[path].replace(right, wrong, 1)}
        assert not all(results(broken)), (right, wrong)


def test_make_repairs_yield_all_variants_before_one_is_repeated():
    first, again = ([json.dumps(dict(task.files)) for task in make_repairs(0, "train", 40)] for _ in range(2))
    assert len(set(first)) == 40
    assert first == again


ROW = {
    "question": "add is wrong",
    "files": {"sums.py": "def add(a, b):\n    return a - b\n", "test_sums.py": "import unittest, sums\n"},
    "tests": [{"module": "sums", "function": "add", "args": [2, 3], "expected": 5}],
}
OUTSIDE = ("", "/etc/passwd", "../x", "a/../b", "a//b", "x\0", "a" * 201)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {}}, "files"),
        *(({"files": {name: ""}}, "not the name") for name in OUTSIDE),
        ({"tests": []}, "tests"),
        ({"tests": [{"module": "a"}]}, "module, function"),
        ({"tests": [{"module": "os; x", "function": "f", "args": [], "expected": 1}]}, "names of Python"),
    ],
)
def test_read_repair_malformed_row_raises(change, message):
    with pytest.raises(ValueError, match=message):
        read_repair(ROW | change)


def write(name, content):
    return call("write_file", json.dumps({"name": name, "content": content}))


@needs_isolation
async def test_repair_rewards_of_right_wrong_and_hostile_rollouts(tmp_path):
    path = tmp_path / "repositories.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    env = load_environment(task="repair", data_path=str(path), timeout_seconds=2)
    [row] = env.get_dataset()
    right = "def add(a, b):\n    return a + b\n"
    rollouts = [
        (1, [call("list_files", "{}"), call("read_file", '{"name": "sums.py"}'), write("sums.py", right), "done"]),
        (1, [write("sums.py", right), call("run", "{\"code\": \"open('sums.py', 'w').write('')\"}"), "done"]),
        (0, ["done"]),
        (0, [write("sums.py", "import os; os._exit(0)"), "done"]),
        (0, [write("sums.py", "def add(a, b):\n    while True: pass\n"), "done"]),
        (0, [write("sums.py", "class A:\n    __eq__ = lambda *_: True\ndef add(a, b): return A()\n"), "done"]),
        (0, [write("../sums.py", right), "done"]),
        (0, [write("json.py", "raise SystemExit(0)"), "done"]),
    ]
    try:
        for reward, replies in rollouts:
            state = await play_async(env, row, replies)
            assert state["reward"] == reward, replies
        calls = [call("run_tests", "{}"), call("run", '{"code": "print(open(\'sums.py\').read())"}'), "done"]
        state = await play_async(env, row, calls)
        tests, printed = [message.content for message in state["completion"] if message.role == "tool"]
        assert "Ran 0 tests" in tests and "return a - b" in printed
        assert "5" not in json.dumps([row["prompt"], row["answer"]]) and row["info"].keys() == {"number", "grading"}
    finally:
        await env.sandbox.close()
