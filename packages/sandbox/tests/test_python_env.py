"""PythonEnv: a Python tool whose session lasts for a rollout, and what hostile calls of it do."""

import json

import pytest
import verifiers as vf
from datasets import Dataset
from tests.support.isolation import needs_isolation
from tests.unit.environments.scripted import ScriptedClient, call

from prime_rl_sandbox.execution import ExecutionResult, SandboxError, SandboxLimits, Verdict
from prime_rl_sandbox.python_env import PythonEnv
from prime_rl_sandbox.session import Session
from prime_rl_sandbox.shared_sandbox import SharedSandbox

in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def env():
    def reward(completion):
        return 1.0

    sandbox = SharedSandbox(num_jails=1, num_warm=2, limits=SandboxLimits(timeout_seconds=1))
    data = Dataset.from_list([{"question": "What is 2 ** 100?", "answer": ""}])
    return PythonEnv(
        sandbox=sandbox, max_output_characters=200, max_turns=5, dataset=data, rubric=vf.Rubric(funcs=[reward])
    )


def runs(code):
    return call("python", json.dumps({"code": code}))


async def play(env, *replies):
    state = await env.rollout(dict(env.get_dataset()[0]), ScriptedClient([*replies, "done"]), "policy", {})
    return state, [message.content for message in state["completion"] if message.role == "tool"]


@needs_isolation
@in_one_loop
async def test_python_env_keeps_variables_and_files_within_a_rollout_only(env):
    (tool,) = env.tool_defs
    assert (tool.name, list(tool.parameters["properties"])) == ("python", ["code"])
    state, results = await play(env, runs("x = 6\nopen('f', 'w').write('z')"), runs("print(x * 7)\nopen('f').read()"))
    assert results == ["1", "42\n'z'"]
    assert state["error"] is None
    assert "python_session" not in state
    _, (name, file) = await play(env, runs("x"), runs("open('f')"))
    assert "NameError" in name and "FileNotFoundError" in file


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([runs("1 / 0")], ["ZeroDivisionError: division by zero"]),
        ([runs("while True: pass"), runs("1")], ["took longer than 1 s", "1"]),
        ([runs("x = 1\nimport os\nos._exit(0)"), runs("x")], ["variables and files are lost", "NameError"]),
        ([runs("print('a' * 10_000)")], ["characters left out"]),
        ([runs("pass")], ["(no output)"]),
        ([runs("import os; n = os.write(1, b'\\xff\\xed\\xa0\\x80')")], ["????"]),
        ([call("python", '{"code": 1}')], ["`code` must be text"]),
        ([call("python", '{"state": {}}')], ["missing 1 required positional argument: 'code'"]),
        ([call("python", "[]")], ["Expected tool arguments to be a dict"]),
        ([call("shell", "{}")], ["shell"]),
    ],
)
@needs_isolation
@in_one_loop
async def test_python_env_failed_calls_are_results_for_the_model(env, replies, expected):
    state, results = await play(env, *replies)
    assert state["error"] is None
    for result, text in zip(results, expected, strict=True):
        assert text in result
        assert len(result) < 400


@needs_isolation
@in_one_loop
async def test_python_env_a_failed_sandbox_is_an_infrastructure_error(env, monkeypatch):
    async def fails(self, code, **options):
        return ExecutionResult(Verdict.INFRA, stderr="the jail was lost")

    monkeypatch.setattr(Session, "run", fails)
    state, results = await play(env, runs("1"))
    assert results == []
    assert isinstance(state["error"].__cause__, SandboxError)
