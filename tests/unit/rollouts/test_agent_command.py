"""Programs as the agents of v1 tasksets, in the sandbox: what they reach, what is trained, how they end."""

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from prime_rl_sandbox.execution import SandboxSettings, current_settings, use_settings
from prime_rl_sandbox.shared_sandbox import close_shared_sandboxes
from tests.support.fake_engine import fake_engine
from tests.support.isolation import needs_isolation
from tests.support.tiny_model import make_tokenizer
from tests.unit.rollouts.conftest import ending_server

pytestmark = needs_isolation
SUPPORT = Path(__file__).parents[2] / "support"
TOKENIZER = make_tokenizer()
AGENT = ["python3", "-c", (SUPPORT / "command_agent.py").read_text(), "{prompt}"]
BASH = '<tool_call>{"name": "bash", "arguments": {"command": "%s"}}</tool_call>'


@pytest.fixture(autouse=True)
def one_jail(monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT / "packages"))
    before = current_settings()
    use_settings(SandboxSettings(num_jails=1))
    yield
    use_settings(before)


def encode(text):
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


@asynccontextmanager
async def agent(*replies, **keys):
    """Yield an environment, its engine, and the prompt and the reply of each request that the engine got."""
    sampled = []

    def reply(body):
        text = replies[min(TOKENIZER.decode(body["token_ids"]).count("<tool_response>"), len(replies) - 1)]
        sampled.append((body["token_ids"], encode(text)))
        return encode(text), "stop"

    config = EnvConfig(**{"id": "coding_taskset", "command": AGENT, "num_retries": 0, **keys})
    environment = worker_main.load(config, Renderer(TOKENIZER), "train")
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = reply
        try:
            async with ending_server(environment):
                yield environment, engine, sampled
        finally:
            await close_shared_sandboxes()


@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_tokens_that_a_program_sampled_are_trained_once_in_one_sample(interpreter):
    keys = {}
    if interpreter is not None:
        keys = {"id": str(SUPPORT / "packages/coding_taskset.py"), "interpreter": interpreter}
    replies = (BASH % "cat src/numbers.txt", BASH % "echo $((19 + 23)) > sum.txt; cat sum.txt", "The sum is 42.")
    async with agent(*replies, **keys) as (environment, engine, sampled):
        rollouts = await environment.run_group(0, 2, engine, {"max_tokens": 300}, 4096)
    assert len(sampled) == 6
    for rollout in rollouts:
        assert rollout.reward == 1.0
        assert rollout.metrics["agent_exit_code"] == 0.0
        (sample,) = rollout.samples
        assert sample.tokens[sample.loss_mask].tolist() == [token for reply in replies for token in encode(reply)]
        assert sample.tokens.tolist() in [prompt + ids for prompt, ids in sampled], "as the engine saw them"


async def test_a_program_reaches_the_model_and_nothing_else_of_the_host():
    look = "ls /root /home; curl -s http://127.0.0.1:22; cat < /dev/tcp/127.0.0.1/22; env"
    async with agent(BASH % look, "done") as (environment, engine, _):
        (rollout,) = await environment.run_group(0, 1, engine, {"max_tokens": 300}, 8192)
    (seen,) = [text for role, text in rollout.text if role == "tool"]
    assert "onnection refused" in seen and "SSH" not in seen
    names = {line.partition("=")[0] for line in seen.splitlines() if "=" in line}
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"} <= names
    assert not names & {"PYTHONPATH", "HF_TOKEN", "VIRTUAL_ENV"}


async def test_a_program_that_fails_after_a_reply_is_scored_and_one_without_replies_fails():
    async with agent("done", command=[*AGENT, "--exit", "3"]) as (environment, engine, _):
        (rollout,) = await environment.run_group(0, 1, engine, {"max_tokens": 300}, 4096)
    assert rollout.metrics["agent_exit_code"] == 3.0
    for command, message in (
        ([*AGENT, "--silent"], "it called no model; it printed: nothing to do"),
        (["/usr/bin/no-such-agent"], "no-such-agent: .*No such file"),
        (["sh", "-c", "echo broken >&2; exit 5"], "exited 5: broken"),
    ):
        async with agent("done", command=command) as (environment, engine, _):
            with pytest.raises(EnvironmentFailed, match=message):
                await environment.run_group(0, 1, engine, {"max_tokens": 300}, 4096)


async def test_only_known_names_in_braces_are_replaced():
    program = "import sys, urllib.request, json, os\n" + (SUPPORT / "command_agent.py").read_text()
    command = ["python3", "-c", program, 'say {"a": {prompt}} {model} {other} {} {base_url} {api_key}']
    async with agent("done", command=command) as (environment, engine, _):
        (rollout,) = await environment.run_group(0, 1, engine, {"max_tokens": 300}, 4096)
    text = rollout.text[0][1]
    assert text.startswith(
        'say {"a": Write the sum of src/numbers.txt to sum.txt.} policy {other} {} http://127.0.0.1:'
    )
    assert text.endswith("/v1 " + text.rpartition(" ")[2]) and "{" not in text.rpartition(" ")[2]


async def test_a_classic_environment_refuses_a_command():
    with pytest.raises(ConfigError, match="need a v1 taskset"):
        worker_main.load(EnvConfig(id="reverse_text", command=AGENT), Renderer(TOKENIZER), "train")
