"""Unmodified agents of PyPI and npm: a batch trains exactly what the engine sampled, each token once."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_rl.configs.known_harnesses import KNOWN_HARNESSES
from tests.integration.agents.scripted_engine import ScriptedEngine, install, read_samples, run_agent
from tests.support.command import json_lines
from tests.support.isolation import make_readable, needs_isolation

pytestmark = [needs_isolation, pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]

INSTALL = {name: known.install for name, known in KNOWN_HARNESSES.items()}
INSTALL["mini_swe_agent"] += " litellm==1.75.8"
INSTALL["openai_agents"] = (
    "uv venv --python /usr/bin/python3 /opt/agents/openai-agents && "
    "uv pip install --python /opt/agents/openai-agents openai-agents==0.24.0"
)
OPENAI_AGENT = """
import asyncio, subprocess, sys
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

@function_tool
def bash(command: str) -> str:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout

async def main(api, streams, model, prompt):
    set_tracing_disabled(True)
    set_default_openai_api(api)
    agent = Agent(name="coder", instructions="Work with bash.", tools=[bash], model=model)
    if streams == "streams":
        async for _ in Runner.run_streamed(agent, prompt).stream_events():
            pass
    else:
        await Runner.run(agent, prompt)

asyncio.run(main(*sys.argv[1:]))
"""


def openai_agent(*options: str) -> dict[str, Any]:
    """The environment's keys for a program with openai-agents."""
    return {"command": ["/opt/agents/openai-agents/bin/python", "-c", OPENAI_AGENT, *options, "{model}", "{prompt}"]}


def with_setting(name: str, before: str, setting: str) -> dict[str, Any]:
    """The environment's keys for a known agent with another setting, written before a part of its script."""
    script = KNOWN_HARNESSES[name].script
    assert before in script
    return {"command": ["sh", "-c", script.replace(before, setting + before), "{prompt}"]}


CASES = {
    **{name: (name, {"harness": name}, 1) for name in KNOWN_HARNESSES},
    "openai_agents_chat": ("openai_agents", openai_agent("chat_completions", "waits"), 1),
    "openai_agents_chat_stream": ("openai_agents", openai_agent("chat_completions", "streams"), 1),
    "openai_agents_responses": ("openai_agents", openai_agent("responses", "waits"), 1),
    "openai_agents_responses_stream": ("openai_agents", openai_agent("responses", "streams"), 1),
    # It asks for a summary after the third reply, and continues from it.
    "codex_compaction": ("codex", with_setting("codex", "web_search", "model_auto_compact_token_limit = 24400\n"), 2),
}


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is /opt/agents in the tests."""
    return make_readable(tmp_path_factory.mktemp("agents"))


@pytest.mark.parametrize("case", CASES)
async def test_batch_of_an_agent_has_each_sampled_token_once(case, agents, tmp_path):
    name, keys, num_samples = CASES[case]
    if not (marker := agents / f"{name}.installed").exists():
        install(agents, INSTALL[name])
        marker.touch()
    engine = ScriptedEngine("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if name == "mini_swe_agent" else None)
    await engine.start()
    try:
        paths = await asyncio.to_thread(run_agent, agents, tmp_path, engine, **keys)
    finally:
        await engine.die()

    batch, rollouts = read_samples(paths)
    assert [len(samples) for samples in rollouts.values()] == [num_samples] * 2
    assert len(engine.sampled) == 2 * (4 + num_samples)  # five turns, and summaries
    samples = [sample for rollout in rollouts.values() for sample in rollout]
    for prompt, ids in engine.sampled:  # no two are equal
        start, end = len(prompt), len(prompt) + len(ids)
        masks = [mask[start:end] for tokens, mask in samples if tokens[:end] == prompt + ids]
        assert masks.count([1] * len(ids)) == 1, "in the context that the engine saw, trained once"
    assert batch.loss_mask.sum() == sum(len(ids) for _, ids in engine.sampled), "and nothing else"
    assert np.array_equal(batch.versions, np.where(batch.loss_mask, 0, -1))
    assert np.allclose(batch.logprobs, np.where(batch.loss_mask, -0.5, 0))
    (metrics,) = json_lines(paths.metrics("orchestrator"))
    expected = {
        "reward/min": 1, "reward/max": 1, "samples/per_rollout": num_samples, "samples/per_branch": 1,
        "samples/tokens_trained_twice": 0, "metrics/agent_exit_code": 0,
    }  # fmt: skip
    assert {key: metrics[key] for key in expected} == expected
