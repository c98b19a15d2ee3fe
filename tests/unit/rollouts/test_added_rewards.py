"""`env.rewards`: functions that the configuration adds to classic environments and v1 tasksets."""

import sys

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.group_attempts import EnvironmentFailed, UnsupportedEnvironment
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from tests.unit.rollouts.conftest import TOKENIZER, encode, served

SAYS = "it is 3"

FUNCTIONS = """
import asyncio


def is_short(text, limit=100):
    return float(len(text.strip()) <= limit)


async def letters(text, completion, answer):
    await asyncio.sleep(0)
    assert text.strip() == completion[-1]["content"].strip()
    return len(text.strip()) + 100 * float(answer or 0)


def ranks(texts, states):
    assert len(texts) == len(states)
    return [float(i) for i in range(len(states))]


def broken(text):
    raise KeyError("broken reward")


def right(text):
    return 1.0


def measured(text):
    return {"reward": 0.5, "length": len(text.strip())}


NUMBER = 3
"""

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


def three(completion):
    return float("3" in completion[-1]["content"])


def load_environment(scored=True, group=False):
    data = Dataset.from_list([{"question": "What is it?", "answer": "2"}])
    env = vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[three]), score_rollouts=scored)
    return vf.EnvGroup([env, env]) if group else env
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, installed):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "rewarded_environment.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    yield
    for module in ("my_rewards", "rewarded_environment"):
        sys.modules.pop(module, None)


async def rollouts(*rewards, env_id="rewarded_environment", warnings=None, **keys):
    """Three rollouts of the first example; the model says "it is 3"."""
    rewards = [{"import_path": f"my_rewards:{name}", **options} for name, options in rewards]
    config = EnvConfig(id=env_id, rewards=rewards, **keys)
    warn = None if warnings is None else warnings.append
    environment = worker_main.load(config, Renderer(TOKENIZER), "train", warn=warn)
    async with served(environment, lambda body: (encode(SAYS), "stop")) as (_, engine):
        return await environment.run_group(0, 3, engine, {"temperature": 1.0}, 512)


async def test_rewards_add_to_a_classic_environment_with_their_own_metrics():
    group = await rollouts(
        ("is_short", {"weight": 0.5}),
        ("is_short", {"weight": 0.0, "name": "very_short", "kwargs": {"limit": 2}}),
        ("letters", {"weight": 0.01}),
    )
    for rollout in group:
        metrics = {name: rollout.metrics[name] for name in ("three", "is_short", "very_short", "letters")}
        assert metrics == {"three": 1.0, "is_short": 1.0, "very_short": 0.0, "letters": 207.0}
        assert rollout.reward == pytest.approx(1.0 + 0.5 + 2.07)
        assert rollout.weights == {"num_turns": 0.0, "three": 1.0, "is_short": 0.5, "very_short": 0.0, "letters": 0.01}


@pytest.mark.parametrize(
    ("reward", "args", "expected"),
    [
        (("ranks", {"weight": 2.0}), {}, [1.0, 3.0, 5.0]),  # one function for the group
        (("is_short", {}), {"group": True}, [2.0] * 3),  # an EnvGroup
        (("is_short", {"weight": 4.0}), {"scored": False}, [4.0] * 3),  # an environment that does not score
    ],
)
async def test_rewards_add_to_every_rollout(reward, args, expected):
    assert [rollout.reward for rollout in await rollouts(reward, args=args)] == expected


async def test_rewards_add_to_a_taskset():
    plain = await rollouts(env_id="toy_taskset")
    count = ("letters", {"weight": 0.0, "name": "count"})
    group = await rollouts(("is_short", {"weight": 0.5}), count, env_id="toy_taskset")
    for rollout, before in zip(group, plain, strict=True):
        assert rollout.reward == before.reward + 0.5
        assert (rollout.metrics["is_short"], rollout.metrics["count"]) == (1.0, 7.0)
        assert rollout.weights == {**before.weights, "is_short": 0.5, "count": 0.0} and before.weights


@pytest.mark.parametrize("env_id", ["rewarded_environment", "toy_taskset"])
async def test_reward_in_a_dictionary_counts_and_its_other_numbers_are_metrics(env_id):
    plain = await rollouts(env_id=env_id)
    group = await rollouts(("measured", {"weight": 2.0}), env_id=env_id)
    assert [rollout.reward for rollout in group] == [rollout.reward + 1 for rollout in plain]
    assert (group[0].metrics["measured"], group[0].metrics["measured/length"]) == (0.5, 7.0)


@pytest.mark.parametrize("env_id", ["rewarded_environment", "toy_taskset"])
async def test_failed_reward_drops_the_rollout_or_counts_as_zero(env_id):
    with pytest.raises(EnvironmentFailed, match="reward function broken raised KeyError"):
        await rollouts(("broken", {}), env_id=env_id)
    warnings = []
    zero = await rollouts(("broken", {}), ("is_short", {}), env_id=env_id, reward_errors="zero", warnings=warnings)
    plain = await rollouts(env_id=env_id)
    assert [rollout.reward for rollout in zero] == [rollout.reward + 1 for rollout in plain]
    assert "counts as 0" in warnings[0] and {rollout.metrics["reward_errors"] for rollout in zero} == {1.0}
    metric = await rollouts(("broken", {"weight": 0.0}), env_id=env_id, warnings=(only := []))
    assert all("broken" not in rollout.metrics for rollout in metric)
    assert "only its metric is missing" in only[0]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("missing", {},
         r"env\.rewards\.0\.import_path of environment 'rewarded_environment' = .*has no function 'missing'"),
        ("NUMBER", {}, r"'NUMBER' is int, not a function"),
        ("letters", {"name": "three"}, r"two reward functions called 'three'; set env\.rewards\.name of one"),
    ],
)  # fmt: skip
async def test_reward_that_cannot_be_added_is_one_line(name, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        await rollouts((name, options))
    assert "\n" not in str(caught.value)


async def test_reward_with_the_name_of_a_taskset_metric_is_refused():
    with pytest.raises(UnsupportedEnvironment, match=r"own metric 'right'; set env\.rewards\.name"):
        await rollouts(("right", {}), env_id="toy_taskset")
