"""v1 tasksets against a fake engine: what comes back, and everything that can go wrong."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import Conversation
from prime_rl.rollouts.clients.inference_client import InferenceClient, InferenceError, InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.verifiers.verifiers_v1 import TasksetEnvironment
from prime_rl.rollouts.workers import worker_main
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from tests.support.fake_engine import fake_engine
from tests.unit.rollouts.conftest import TOKENIZER, encode, served

SAMPLING = {"temperature": 1.0, "max_tokens": 300}
pytestmark = pytest.mark.usefixtures("installed")


def load(name="toy_taskset", strategy="interleaved", warn=None, runtime="sandbox", keys=None, **args):
    config = EnvConfig(id=name, args=args, runtime=runtime, **(keys or {}))
    return worker_main.load(config, Renderer(TOKENIZER, strategy=strategy), "train", warn=warn)


def says(text, cut=False):
    return (encode(text)[:-1], "length") if cut else (encode(text), "stop")


@asynccontextmanager
async def playing(name="toy_taskset", strategy="interleaved", warn=None, keys=None, **args):
    """A loaded taskset, a fake engine that says 'it is 3', and a client of it."""
    environment = load(name, strategy, warn, keys=keys, **args)
    async with served(environment, lambda body: says("it is 3")) as (fake, engine):
        yield environment, fake, engine


async def test_group_returns_the_tokens_that_the_server_reported():
    async with playing() as (environment, fake, engine):
        fake.step = 5
        rollouts = await environment.run_group(3, 2, engine, SAMPLING, 256, seed=[7])
    for rollout, request in zip(rollouts, fake.requests, strict=True):
        (sample,) = rollout.samples
        sampled, _ = says("it is 3")
        prompt = request["token_ids"]
        assert TOKENIZER.decode(prompt) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert sample.tokens.tolist() == prompt + sampled
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * len(sampled)
        assert sample.versions.tolist() == [-1] * len(prompt) + [5] * len(sampled)
        assert sample.logprobs.tolist() == [0.0] * len(prompt) + [-0.5] * len(sampled)
        assert rollout.reward == 2.0  # right, weighted
        assert rollout.metrics == {"num_turns": 1, "right": 1, "letters": 0, "length": len("it is 3")}
        assert not rollout.is_truncated
        assert rollout.text == (("system", "Be brief."), ("user", "What is it?"), ("assistant", "it is 3"))
    seeds = {request["sampling_params"]["seed"] for request in fake.requests}
    assert len(seeds) == 2
    assert {request["sampling_params"]["temperature"] for request in fake.requests} == {1.0}


async def test_truncated_completion_is_scored_and_marked_and_seeds_repeat():
    async with playing() as (environment, fake, engine):
        fake.reply = lambda body: says("it is 3, as"[: body["sampling_params"]["max_tokens"]], cut=True)
        (rollout,) = await environment.run_group(3, 1, engine, {"max_tokens": 9}, 256)
        assert (rollout.is_truncated, rollout.reward, rollout.text[-1][1]) == (True, 2.0, "it is 3, ")
        prompt = len(fake.requests[0]["token_ids"])
        await environment.run_group(3, 1, engine, {"max_tokens": 9}, prompt + 4)
        assert fake.requests[1]["sampling_params"]["max_tokens"] == 4
        for seed in ([7], [7], None):
            await environment.run_group(3, 2, engine, SAMPLING, 256, seed=seed)
        seeds = [request["sampling_params"].get("seed") for request in fake.requests[2:]]
        assert sorted(seeds[:2]) == sorted(seeds[2:4]) and seeds[4:] == [None, None]


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("setup", "KeyError.*broken task"),
        ("reward", r"function right raised KeyError: 'broken reward' \(env\.reward_errors = \"zero\" counts it as 0\)"),
        ("nan", r"reward right is nan, not a finite number \(env\.reward_errors"),
        ("connection", r"ConnectionError: no judge$"),
    ],
)
async def test_failed_task_fails_its_group(fail, message):
    async with playing(task={"fail": fail}) as (environment, _, engine):
        with pytest.raises(EnvironmentFailed, match=message):
            await environment.run_group(3, 2, engine, SAMPLING, 256)


@pytest.mark.parametrize(
    ("args", "keys", "reward", "metrics", "warning"),
    [
        ({"fail": "reward"}, {"reward_errors": "zero"}, 7.0, {"right": 0.0, "reward_errors": 1.0}, "it counts as 0"),
        ({"fail": "nan"}, {"reward_errors": "zero"}, 7.0, {"right": 0.0, "reward_errors": 1.0}, "it counts as 0"),
        ({"fail": "unweighted"}, {"reward_errors": "zero"}, 9.0, {"reward_errors": 0.0}, "only its metric is missing"),
        ({"fail": "unweighted"}, {}, 9.0, {}, "only its metric is missing"),
    ],
)
async def test_failed_reward_of_a_task_counts_as_zero_or_lacks_its_metric(args, keys, reward, metrics, warning):
    warnings = []
    task = {"per_letter": 1.0, **args}
    async with playing(task=task, warn=warnings.append, keys={"num_retries": 0, **keys}) as (environment, _, engine):
        for rollout in await environment.run_group(3, 2, engine, SAMPLING, 256):
            others = {"num_turns": 1, "letters": 7.0, "length": 7.0, **({"right": 1.0} if reward == 9 else {})}
            assert (rollout.reward, rollout.metrics) == (reward, {**others, **metrics})
    assert len(warnings) == 1 and warning in warnings[0]
    if keys:
        async with playing(task={"fail": "connection"}, keys={"num_retries": 0, **keys}) as (environment, _, engine):
            with pytest.raises(EnvironmentFailed, match="no judge"):
                await environment.run_group(3, 2, engine, SAMPLING, 256)


async def test_retries_of_the_environment_repeat_episodes():
    async with playing(task={"fail": "reward"}, env={"retries": {"max_retries": 1}}) as (environment, fake, engine):
        with pytest.raises(EnvironmentFailed, match="broken reward"):
            await environment.run_group(3, 1, engine, SAMPLING, 256)
        assert len(fake.requests) == 2


async def test_group_that_cannot_be_sampled_raises_the_reason():
    async with playing() as (environment, fake, engine):
        with pytest.raises(SampleTooLong):
            await environment.run_group(3, 2, engine, SAMPLING, environment.prompt_tokens(3))
        assert fake.requests == []
        async with InferenceClient("http://127.0.0.1:9", "m", "") as gone:
            with pytest.raises(InferenceServerLost):
                await environment.run_group(3, 2, gone, SAMPLING, 256)
        fake.fault = lambda body: web.json_response({"error": "no such model"}, status=404)
        with pytest.raises(InferenceError, match="no such model"):
            await environment.run_group(3, 2, engine, SAMPLING, 256)
        assert len(fake.requests) <= 2  # nobody tried again


async def test_cancelled_group_leaves_no_trace_clients():
    async with playing() as (environment, fake, engine):
        asked = asyncio.Event()

        async def gate(body):
            asked.set()
            await asyncio.Event().wait()

        fake.gate = gate
        task = asyncio.create_task(environment.run_group(3, 1, engine, SAMPLING, 256))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert environment._adapter.client.traces == {}
        assert not engine._session.connector._acquired  # the request is dropped, so that the server stops sampling
        fake.gate = None
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 256)
        assert rollout.reward == 2.0


async def test_conversation_that_exceeds_seq_len_is_scored():
    async with playing("talking_taskset") as (environment, _, engine):
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 40)
        assert rollout.is_truncated and rollout.metrics["num_turns"] == 2 and rollout.reward == 2.0
        with pytest.raises(SampleTooLong):  # the environment cannot go on without its second turn
            await environment.run_group(3, 1, engine, SAMPLING, 25)


async def test_two_trainable_agents_are_evaluated():
    config = EnvConfig(id="talking_taskset", args={"env": {"train_both": True}})
    environment = worker_main.load(config, Renderer(TOKENIZER), "eval", keep_messages=True)
    async with served(environment, lambda body: says("it is 3")) as (_, engine):
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 256)
    assert isinstance(rollout, Conversation)
    assert {message["agent"] for message in rollout.messages} == {"agent", "other"}
    assert rollout.completion_tokens == 6 * len(says("it is 3")[0])
    assert rollout.metrics["agent/right"] == rollout.metrics["other/right"] == 1.0


async def test_agent_limit_ends_the_conversation_which_is_scored():
    async with playing("talking_taskset", env={"agent": {"max_turns": 3}}) as (environment, _, engine):
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 256)
        assert rollout.metrics["num_turns"] == 3 and rollout.reward == 2.0
    async with playing(task={"stop_after": 0}) as (environment, fake, engine):
        with pytest.raises(EnvironmentFailed, match="no trainable agent"):
            await environment.run_group(3, 1, engine, SAMPLING, 256)
        assert fake.requests == []


async def test_agent_sampling_is_used_ignored_with_a_warning_or_refused():
    warnings = []
    sampling = {"max_tokens": 5, "stop": "3", "temperature": 0.2}
    async with playing(warn=warnings.append, env={"agent": {"sampling": sampling}}) as (environment, fake, engine):
        (rollout,) = await environment.run_group(3, 1, engine, SAMPLING, 256)
        await environment.run_group(3, 1, engine, {**SAMPLING, "max_tokens": 4}, 256)
    asked = [request["sampling_params"] for request in fake.requests]
    assert [(one["max_tokens"], one["stop"], one["temperature"]) for one in asked] == [(5, ["3"], 1.0), (4, ["3"], 1.0)]
    assert rollout.text[-1][1].strip() == "it is"
    (warning,) = warnings
    assert "temperature = 0.2)" in warning
    async with playing(env={"agent": {"sampling": {"logit_bias": {"5": 1}}}}) as (environment, fake, engine):
        with pytest.raises(EnvironmentFailed, match="logit_bias is not supported"):
            await environment.run_group(3, 1, engine, SAMPLING, 256)
        assert fake.requests == []


async def test_agents_use_the_chat_harness_by_default():
    def harnesses(**env):
        config = load("talking_taskset", runtime="subprocess", env=env)._adapter.env.config
        return config.agent.harness.id, config.other.harness.id

    assert harnesses() == ("prime_rl_chat", "prime_rl_chat")
    assert harnesses(agent={"harness": {"id": "bash"}}) == ("bash", "prime_rl_chat")
    assert harnesses(other={"harness": {"id": "null"}}) == ("prime_rl_chat", "null")


SHELL = {"harness": {"id": "bash"}}


def test_shell_on_this_machine_raises_unless_allowed():
    env = {"other": SHELL | {"runtime": {"type": "subprocess"}}}
    refusal = r"agent 'other' .*harness 'bash'.* on this machine.*runtime = \"subprocess\""
    with pytest.raises(ConfigError, match=refusal) as error:
        load("talking_taskset", env=env)
    assert "\n" not in str(error.value)
    for allowed in (env, {"other": SHELL}):
        warnings = []
        environment = load("talking_taskset", runtime="subprocess", warn=warnings.append, env=allowed)
        assert environment._adapter.env.config.other.runtime.type == "subprocess"
        assert environment._adapter.env.config.other.harness.id == "bash"
        assert len(warnings) == 1 and "agent 'other'" in warnings[0] and "without isolation" in warnings[0]


def test_shell_in_a_container_needs_no_permission():
    environment = load(env={"agent": SHELL | {"runtime": {"type": "docker"}}})
    assert environment._adapter.env.config.agent.runtime.type == "docker"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"runtime": "subprocess", "env": {"other": {"harness": {"id": "null"}}}},
            "runtime = 'subprocess' has no effect: none of its agents runs programs",
        ),
        ({"env": {"agent": {"model": "other"}}}, "args.env.agent.model = 'other' has no effect"),
    ],
)
def test_setting_without_effect_logs_a_warning(keys, message):
    warnings = []
    load("talking_taskset", warn=warnings.append, **keys)
    assert len(warnings) == 1 and message in warnings[0]


async def test_replies_outside_the_trace_are_not_trained():
    """The second answer is rewritten by the task's hook: what the trace has of it was never sampled."""
    async with playing("rewriting_taskset") as (environment, fake, engine):
        (rollout,) = await environment.run_group(0, 1, engine, SAMPLING, 512)
    assert len(fake.requests) == 3
    assert rollout.metrics["num_turns"] == 2
    sampled, _ = says("it is 3")
    trained = [token for sample in rollout.samples for token in sample.tokens[sample.loss_mask].tolist()]
    assert trained == sampled * 2


@pytest.mark.extended
async def test_tools_are_called():
    calls = ['{"name": "math_add", "arguments": {"a": 2, "b": 2}}', '{"name": "math_fail", "arguments": {}}']
    calls += ['{"name": "sub", "arguments": {}}']
    said = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    async with playing("tool_taskset") as (environment, fake, engine):
        fake.reply = lambda body: says("4" if "<tool_response>" in TOKENIZER.decode(body["token_ids"]) else said)
        (rollout,) = await environment.run_group(0, 1, engine, SAMPLING, 2048)
    (sample,) = rollout.samples
    assert sample.tokens[sample.loss_mask].tolist() == says(said)[0] + says("4")[0]
    assert rollout.reward == 1.0
    prompt = TOKENIZER.decode(fake.requests[0]["token_ids"])
    assert '"name": "math_add"' in prompt and "Add two numbers." in prompt
    user, asked, added, failed, unknown, answer = rollout.text
    assert user == ("user", "What is 2 + 2?")
    assert asked[1].splitlines() == ['math_add({"a": 2, "b": 2})', "math_fail({})", "sub({})"]
    assert added == ("tool", "4")
    assert "broken tool" in failed[1] or "rror" in failed[1]
    assert unknown == ("tool", "error: there is no tool 'sub'")
    assert answer == ("assistant", "4")


async def test_arguments_configure_the_taskset():
    environment = load(question="And now?", examples=2)
    assert isinstance(environment, TasksetEnvironment)
    assert len(environment) == 2
    assert environment.prompt_tokens(0) == load().prompt_tokens(0) - len("What is it?") + len("And now?")
    assert len(load(env={"num_tasks": 3})) == 3
    assert len(load(endless=True, env={"num_tasks": 3})) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"exmaples": 3}, "exmaples"),
        ({"examples": "many"}, "examples"),
        ({"examples": 0}, "has no tasks"),
        ({"endless": True}, r"env\.args\.env\.num_tasks"),
        ({"env": {"agent": {"harness": {"id": "nothing_such"}}}}, "nothing_such"),
        ({"env": 3}, r"env\.args\.env = 3"),
        ({"env": None}, r"env\.args\.env = None"),
        ({"keys": {"step_rewards": "add"}}, "step_rewards = 'add' of environment 'toy_taskset' needs a classic"),
    ],
)
async def test_invalid_arguments_raise_with_their_name(args, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(**args)
    assert "\n" not in str(error.value)


@pytest.mark.extended
@pytest.mark.slow
async def test_v1_taskset_runs_in_a_worker_process(tokenizer_dir):
    async with fake_engine() as fake, WorkerLauncher() as host:
        fake.reply = lambda body: says("it is 3")
        config = EnvConfig(id="owner/toy-taskset")
        async with EnvironmentPool(config, host, ModelAccess("m", str(tokenizer_dir))) as pool:
            assert len(pool) == 5
            groups = await asyncio.gather(*(pool.run_group(i, 4, fake.url, SAMPLING, 256) for i in (2, 3)))
            assert [[rollout.reward for rollout in group] for group in groups] == [[0.0] * 4, [2.0] * 4]
            fake.fault = lambda body: web.json_response({"error": "no"}, status=400)
            with pytest.raises(InferenceError):
                await pool.run_group(2, 4, fake.url, SAMPLING, 256)
            with pytest.raises(InferenceServerLost):
                await pool.run_group(2, 4, "http://127.0.0.1:9", SAMPLING, 256)
