"""`eval` in the environments with tools: real workers, real sandbox, and a scripted model that knows what to do."""

import json

import pytest
from agentic.planning import make_tasks
from agentic.repositories import make_repairs
from agentic.repository_templates import TEMPLATES

from tests.support.fake_chat import calls, fake_chat, says
from tests.support.isolation import needs_isolation

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

ARGUMENT = {"go": "room", "take": "thing"}


def call(tool, /, **arguments):
    """Return a choice that calls a tool; its arguments may have any name."""
    choice = calls(tool)
    choice["message"]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    return choice


def num_replies(body):
    """Return how often the model has replied in this conversation."""
    return sum(message["role"] == "assistant" for message in body["messages"])


def question_of(body):
    return next(message["content"] for message in body["messages"] if message["role"] == "user")


async def evaluate_with(evaluate, reply, env, **keys):
    async with fake_chat() as server:
        server.reply = reply
        [result] = await evaluate(server.url, env=[env], seq_len=16384, **keys)
        return result


async def test_planning_of_twenty_turns_and_more_earns_the_reward(evaluate):
    plans = {task.start: task.plan for task in make_tasks(0, "eval", 1, 20, 36)}
    [plan] = plans.values()

    def act(body):
        action, argument = plan[num_replies(body)]
        return call(action, **({ARGUMENT[action]: argument} if action in ARGUMENT else {}))

    result = await evaluate_with(evaluate, act, {"id": "agentic", "args": {"num_generated": 1}})
    assert result["reward/mean"] == 1
    assert result["metrics/num_turns"] == len(plan) >= 20


@needs_isolation
async def test_repair_with_the_correct_files_earns_the_reward(evaluate):
    [task] = make_repairs(0, "eval", 1)
    [template] = [template for template in TEMPLATES if template.complaint == task.question]
    repairs = [(name, text) for name, text in template.files.items() if task.files[name] != text]

    def repair(body):
        done = num_replies(body)
        if done == 0:
            return call("run_tests")
        if done <= len(repairs):
            name, content = repairs[done - 1]
            return call("write_file", name=name, content=content)
        return says("done")

    env = {"id": "agentic", "args": {"task": "repair", "num_generated": 1}}
    result = await evaluate_with(evaluate, repair, env)
    assert result["reward/mean"] == 1
    assert (await evaluate_with(evaluate, lambda body: says("done"), env | {"name": "idle"}))["reward/mean"] == 0


@needs_isolation
async def test_python_tool_keeps_variables_between_turns(evaluate, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "6 times 7?", "answer": 42}) + "\n")
    replies = [call("python", code="x = 6 * 7"), call("python", code="print(x)")]

    def compute(body):
        if (done := num_replies(body)) < len(replies):
            return replies[done]
        return says(f"<answer>{body['messages'][-1]['content']}</answer>")

    env = {"id": "python_tool", "args": {"data_path": str(tmp_path / "rows.jsonl")}}
    assert (await evaluate_with(evaluate, compute, env))["reward/mean"] == 1


async def test_research_answer_with_sources_earns_the_reward(evaluate):
    from research.generated import make_documents

    _, questions = make_documents(0, 20)
    known = {question.text: question for question in questions}

    def answer(body):
        question = known[question_of(body)]
        names = sorted(question.evidence)
        if (done := num_replies(body)) < len(names):
            return call("read", name=names[done])
        return says(f"<answer>{question.answers[0]} {' '.join(f'[{name}]' for name in names)}</answer>")

    result = await evaluate_with(evaluate, answer, {"id": "research", "args": {"num_towns": 20}})
    assert (result["examples"], result["reward/mean"]) == (11, 1)
