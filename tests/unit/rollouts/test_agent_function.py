"""Coroutine functions of users as the agents of v1 tasksets."""

import itertools
import re
import sys
import textwrap
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from tests.unit.rollouts.conftest import QUESTIONS, TOKENIZER, encode, served

AGENT = """
    import aiohttp

    async def ask(messages, base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages}) as got:
                body = await got.json()
        if got.status != 200:
            raise RuntimeError(body["error"]["message"])
        return body["choices"][0]["message"]
"""
TWO_TURNS = """
    async def solve(messages, task, base_url, api_key, *, tries=2):
        while len(messages) < 2 * tries:
            messages = [*messages, await ask(messages, base_url, api_key), {"role": "user", "content": "Sure?"}]
        return {"reward": 0.25 if task["info"]["level"] == "hard" else 0.5, "tries": tries}
"""
ONE_TURN = """
    async def solve(messages, **others):
        await ask(messages, others["base_url"], others["api_key"])
        %s
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return what loads an environment with rows and an agent of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rows.csv").write_text(QUESTIONS)
    numbers = itertools.count()

    def load(agent, grader="none", **keys):
        path = tmp_path / f"my_agent_{next(numbers)}.py"  # a file is imported once
        path.write_text(textwrap.dedent(AGENT) + textwrap.dedent(agent))
        args = {"data_path": str(tmp_path / "rows.csv"), "info_columns": ["level"], "grader": grader}
        given = {"id": "dataset", "args": args, "agent": f"{path.name}:solve", "num_retries": 0} | keys
        return worker_main.load(EnvConfig(**given), Renderer(TOKENIZER), "train")

    return load


async def play(environment, reply="It is 8.", example=1, count=1, seq_len=4096):
    """Return a group of an environment whose model has one reply, and the prompts that it got."""
    prompts = []

    def answer(body):
        prompts.append(body["token_ids"])
        return encode(reply), "stop"

    async with served(environment, answer) as (_, engine):
        return await environment.run_group(example, count, engine, {"max_tokens": 50}, seq_len), prompts


@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_each_token_that_an_agent_sampled_is_trained_once_with_its_reward(load, interpreter):
    rollouts, prompts = await play(load(TWO_TURNS, interpreter=interpreter), count=2)
    assert len(prompts) == 4
    for rollout in rollouts:
        assert (rollout.reward, rollout.metrics["agent_reward"], rollout.metrics["tries"]) == (0.25, 0.25, 2.0)
        (sample,) = rollout.samples
        assert sample.tokens[sample.loss_mask].tolist() == 2 * encode("It is 8.")
        assert sample.tokens.tolist() in [prompt + encode("It is 8.") for prompt in prompts], "as the engine saw them"


async def test_what_is_no_request_is_refused_in_the_vendors_form_and_samples_nothing(load):
    agent = """
        BAD = [("", b"{"), ("", b"[]"), ("", {}), ("", {"messages": "a"}), ("", {"messages": [{"content": "a"}]}),
               ("", {"messages": [{"role": 5}]}), ("/none", {}), ("", {"stream": True, "stream_options": "a"})]
        BAD = [(f"/chat/completions{path}", body) for path, body in BAD]
        BAD += [("/messages", {"messages": [{"role": "assistant", "content": "{"}]}), ("/messages", {"system": 5}),
                ("/responses", {"input": 5}), ("/responses", {"tools": [{"type": "custom", "name": ["a"]}]})]
        BAD += [("/messages", {"model": "no max_tokens"}), ("/chat/completions", {"tools": [{"type": "function"}]}),
                ("/responses", {"input": [{"type": "reasoning", "summary": 5}]})]
        WRONG = {"stream": "yes", "temperature": float("nan"), "top_p": [1], "seed": True}
        BAD += [(path, {"max_tokens": 5, name: value}) for path in ("/chat/completions", "/messages", "/responses")
                for name, value in WRONG.items()]

        async def solve(messages, base_url, api_key):
            hello = {"messages": messages, "input": "hello"}
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
                for path, body in BAD:
                    body = {"data": body} if isinstance(body, bytes) else {"json": {**hello, **body} if body else body}
                    async with session.post(base_url + path, **body) as answer:
                        assert answer.status == (404 if path.endswith("none") else 400), (body, await answer.text())
                        message = (await answer.json())["error"]["message"]
                        assert message and "Error" not in message, message
            await ask(messages, base_url, api_key)
    """
    (rollout,), prompts = await play(load(agent))
    assert (len(prompts), len(rollout.samples)) == (1, 1)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [("return 0.5", 1.5), ("pass", 1.0), ("return {'correct_answer': 7.0, 'steps': 3}", 1.0)],
)
async def test_the_reward_of_an_agent_is_added_to_that_of_the_task(load, returned, reward):
    ((rollout,), _) = await play(load(ONE_TURN % returned, grader="number"))
    assert (rollout.reward, rollout.metrics["correct_answer"], rollout.answer) == (reward, 1.0, "8")
    assert rollout.metrics.get("steps") == (3.0 if "steps" in returned else None)


async def test_answer_that_the_math_grader_cannot_grade_is_counted(load):
    environment = load(ONE_TURN % "pass", grader="math")
    for reply, expected in ((r"\boxed{8}", (1.0, 0.0)), (r"\boxed{9^{9^{9^9}}}", (0.0, 1.0))):
        ((rollout,), _) = await play(environment, reply)
        assert (rollout.reward, rollout.metrics.get("grading_failed")) == expected


async def test_the_agent_of_the_page_is_trained_on_its_three_attempts(load):
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    (agent,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def solve" in block]
    (rollout,), prompts = await play(load(agent), "It is 7.")
    assert (len(prompts), rollout.reward, len(rollout.samples)) == (3, 0.0, 1)


@pytest.mark.extended(after=7)
@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (ONE_TURN % "raise LookupError('no such tool')", "LookupError: no such tool"),
        (ONE_TURN % "return {'reward': 'high'}", "what the agent returned as 'reward'"),
        (ONE_TURN % "return float('nan')", "what the agent returned as 'reward'"),
        (ONE_TURN % "return 10**400", "what the agent returned as 'reward'"),
        (ONE_TURN % "return {'agent_reward': 1}", "which is a metric of prime-rl"),
        (ONE_TURN % "raise ValueError('judge: maximum context length is 8192')", "judge: maximum context length"),
        ("async def solve(prompt): return 1.0", "it called no model"),
    ],
)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_an_agent_that_fails_or_calls_no_model_fails_its_rollout(load, agent, message, interpreter):
    with pytest.raises(EnvironmentFailed, match=message):
        await play(load(agent, interpreter=interpreter))


async def test_an_agent_that_catches_its_cancellation_is_not_scored(load):
    agent = """
        import asyncio

        async def solve(messages, base_url, api_key):
            await ask(messages, base_url, api_key)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return 1.0
    """
    with pytest.raises(EnvironmentFailed):
        await play(load(agent, timeout_seconds=0.5))


async def test_values_of_a_partial_function_are_kept(load):
    agent = """
        import functools

        async def run(messages, base_url, api_key, role, prompt):
            await ask(messages, base_url, api_key)
            return {"mine": role == "judge" and prompt.startswith("What")}

        solve = functools.partial(run, role="judge")
    """
    ((rollout,), _) = await play(load(agent))
    assert rollout.metrics["mine"] == 1.0


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_a_full_context_ends_the_conversation_which_is_scored(load, interpreter):
    environment = load(TWO_TURNS.replace("tries=2", "tries=1000"), grader="contains", interpreter=interpreter)
    ((rollout,), _) = await play(environment, "8", seq_len=300)
    assert rollout.is_truncated
    assert (rollout.reward, "agent_reward" in rollout.metrics) == (1.0, False)


@pytest.mark.parametrize(
    ("agent", "keys", "message"),
    [
        ("def solve(prompt): return 1.0", {}, "is no `async def` function; wrap it with asyncio.to_thread"),
        ("async def solve(prompt, client): return 1.0", {}, "takes 'client'; an agent gets messages, prompt, task"),
        ("class solve: pass", {}, "is a class; name an `async def` function, or an object"),
        ("async def solve(prompt): yield 1.0", {}, "is a generator; return the reward instead of yielding"),
        ("solve = 3", {}, "'solve' is int, not a function"),
        ("async def solve(prompt): pass", {"id": "reverse_text", "args": {}}, "need a v1 taskset"),
        ("async def solve(prompt): pass", {"command": ["mini"]}, "two agents; set one"),
        ("async def solve(prompt): pass", {"harness": "codex"}, "env.harness and env.agent are two agents; set one"),
        (
            "async def solve(prompt): pass",
            {"harness": "bash"},
            "known ones are claude_code, .*; `command` runs any other",
        ),
    ],
)
def test_what_cannot_be_an_agent_is_refused_before_the_run(load, agent, keys, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        load(agent, **keys)
