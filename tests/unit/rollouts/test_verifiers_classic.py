"""Every kind of classic environment and rubric through the adapter: what verifiers counts as 0 is an error here."""

import asyncio
import importlib.util
from zlib import crc32

import pytest
import verifiers as vf
from datasets import Dataset

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.clients.inference_client import InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed, GroupAccount, SampleTooLong
from prime_rl.rollouts.workers import worker_main
from tests.support.virtual_clock import virtual_clock
from tests.unit.rollouts.conftest import NumberingEngine

DATA = Dataset.from_list([{"question": f"say {i}", "answer": str(i)} for i in range(4)])
HINT = r'\(env\.reward_errors = "zero" counts it as 0, as verifiers does\)'


def single(*funcs, **kwargs):
    return vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=list(funcs)), **kwargs)


def fine(answer, **kwargs):
    return float(answer)


def broken(completion, **kwargs):
    raise KeyError("broken reward")


async def broken_later(completion):
    await asyncio.sleep(0)
    raise KeyError("broken reward")


def none(completion):
    return None


def hundred(completion):
    return 100.0


def ranks(states, **kwargs):
    return [i / len(states) for i in range(len(states))]


def broken_ranks(states):
    raise KeyError("broken reward")


def named_ranks(states):
    return {0: 1.0, 1: 0.0, 2: 0.5}


def short_ranks(states):
    return [1.0]


def nan_ranks(states):
    return [0.5] * (len(states) - 1) + [float("nan")]


class Late(vf.SingleTurnEnv):
    """Adds its reward function while it runs."""

    async def setup_state(self, state, **kwargs):
        if broken not in self.rubric._get_reward_funcs():
            self.rubric.add_reward_func(broken)
        return state


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (single(fine, broken), "broken raised KeyError: 'broken reward'"),
        (
            vf.SingleTurnEnv(dataset=DATA, rubric=vf.RubricGroup([vf.Rubric([fine]), vf.Rubric([fine, broken])])),
            "broken raised KeyError: 'broken reward'",
        ),
        (Late(dataset=DATA, rubric=vf.Rubric(funcs=[fine])), "broken raised KeyError: 'broken reward'"),
        (single(broken_later), "broken_later raised KeyError: 'broken reward'"),
        (single(fine, broken_ranks), "broken_ranks raised KeyError: 'broken reward'"),
        (single(short_ranks), r"short_ranks returned \[1.0\] for a group of 3"),
        (single(named_ranks), r"named_ranks returned \{0: 1.0, 1: 0.0, 2: 0.5\} for a group of 3"),
        (single(nan_ranks), "nan_ranks is nan, not a finite number"),
    ],
    ids=["plain", "rubric group", "added", "coroutine", "group", "short group", "named group", "nan group"],
)
async def test_failed_reward_function_fails_the_group_in_every_rubric(play_classic, env, message):
    with pytest.raises(EnvironmentFailed, match=f"^reward function {message} {HINT}$"):
        await play_classic(env, count=3)


async def test_a_reward_that_is_none_is_an_error(play_classic):
    with pytest.raises(EnvironmentFailed, match=rf"^reward function none is None, not a number {HINT}$"):
        await play_classic(single(none))


# Groups of environments


async def test_failed_reward_in_an_env_group_fails_the_group(play_classic):
    env = vf.EnvGroup([vf.EnvGroup([single(fine), single(fine, broken)])])
    assert (await play_classic(env, example=2))[0].reward == 2.0
    with pytest.raises(EnvironmentFailed, match="reward function broken raised KeyError"):
        await play_classic(env, example=6)


def extra(info):
    return {"a": 10.0, "b": 20.0, "xa": 30.0, "ya": 40.0}["".join(info["env_id"])]


class Cleaning(vf.Rubric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cleaned = []

    @vf.cleanup
    async def release(self, state):
        self.cleaned.append(state["info"]["env_id"])


class Doubling(vf.RubricGroup):
    async def score_group(self, states):
        await super().score_group(states)
        for state in states:
            state["reward"] *= 2


async def test_rubrics_and_functions_that_are_added_to_an_env_group_count(play_classic):
    """extra and hundred of the group, ranks 0, 1/2; the second environment counts the answer twice, and 50 more."""
    group = vf.EnvGroup([single(fine), single(fine, fine)], env_names=["a", "b"])
    group.add_rubric(cleaning := Cleaning(funcs=[extra]))
    group.add_rubric(vf.Rubric(funcs=[ranks]))
    group.rubric.add_reward_func(hundred)
    group.envs[1].rubric.add_reward_func(hundred, weight=0.5)
    group.rubric.add_metric(broken)
    rollouts = await play_classic(group, example=1, count=2)
    assert [rollout.reward for rollout in rollouts] == [1 + 10 + 100, 1 + 10 + 100 + 0.5]
    assert rollouts[1].metrics == {"fine": 1, "num_turns": 1, "extra": 10, "ranks": 0.5, "hundred": 100}
    assert cleaning.cleaned == ["a", "a"]
    rollouts = await play_classic(group, example=7, count=2)
    assert [rollout.reward for rollout in rollouts] == [6 + 50 + 20 + 100, 6 + 50 + 20 + 100 + 0.5]


@pytest.mark.parametrize(("example", "reward"), [(1, 2 * (1 + 30)), (9, 2 * (1 + 100 + 40))])
async def test_rubrics_of_nested_env_groups_count_at_every_depth(play_classic, example, reward):
    groups = [vf.EnvGroup([single(fine), single(fine)], env_names=["a", "b"]) for _ in range(2)]
    groups[1].add_rubric(vf.Rubric(funcs=[hundred]))
    outer = vf.EnvGroup(groups, env_names=["x", "y"])
    outer.rubric = Doubling([outer.rubric, vf.Rubric(funcs=[extra])])
    (rollout,) = await play_classic(outer, example=example)
    assert (rollout.reward, rollout.text[0]) == (reward, ("user", f"say {example % 4}"))


def test_rubric_of_an_env_group_that_would_be_ignored_raises(load_classic):
    group = vf.EnvGroup([single(fine)])
    group.rubric = vf.Rubric(funcs=[fine])
    with pytest.raises(ConfigError, match=r"replaces the rubric of an EnvGroup.*call add_rubric"):
        load_classic(group)
    group = vf.EnvGroup([single(fine)])
    group.add_rubric(type("Advantages", (vf.Rubric,), {"has_advantages": True})(funcs=[fine]))
    with pytest.raises(ConfigError, match="computes advan"):
        load_classic(group)


# Rollouts that are not scored as the others


def number(state):
    """The number of a rollout in its group."""
    return int(state["completion"][-1]["content"].split()[-1])


def broken_for_one(state):
    if number(state) == 3:
        raise KeyError("cannot grade")
    return 0.0


def best(states):
    return [float(number(state) == max(map(number, states))) for state in states]


class Best(vf.Rubric):
    async def score_group(self, states):
        for state, value in zip(states, best(states), strict=True):
            state["reward"], state["metrics"] = value, {"best": value}


@pytest.mark.parametrize(
    "rubric",
    [vf.Rubric([broken_for_one, ranks, best]), vf.RubricGroup([vf.Rubric([broken_for_one]), Best()])],
    ids=["functions", "own score_group"],
)
async def test_rollout_that_cannot_be_graded_does_not_take_part_in_rewards_of_the_group(play_classic, rubric):
    env = vf.SingleTurnEnv(dataset=DATA, rubric=rubric)
    rollouts = await play_classic(env, count=4, min_rollouts=2)
    assert [rollout.metrics["best"] for rollout in rollouts] == [0, 0, 1]
    if type(rubric) is vf.Rubric:
        assert [rollout.metrics["ranks"] for rollout in rollouts] == pytest.approx([0, 1 / 3, 2 / 3])
    with pytest.raises(EnvironmentFailed, match="cannot grade"):
        await play_classic(env, count=4, min_rollouts=4)


async def test_unscored_rollouts_are_not_scored(play_classic):
    assert (await play_classic(single(broken, score_rollouts=False)))[0].reward == 0


# Prompts and turns


def test_examples_without_the_answer_that_a_reward_function_takes_raise(load_classic):
    data = DATA.rename_column("answer", "solution")
    with pytest.raises(ConfigError, match=r"examples have no column 'answer' \(but .*'solution'.*function fine takes"):
        load_classic(vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[fine])))
    own = type("Own", (vf.SingleTurnEnv,), {})  # might set the answer during the rollout
    load_classic(own(dataset=data, rubric=vf.Rubric(funcs=[fine])))


async def test_plain_text_prompt_is_a_user_message(load_classic, play_classic, renderer):
    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": "say 1", "answer": "1"}]), rubric=vf.Rubric([fine]))
    (rollout,) = await play_classic(env)
    expected = renderer.render([{"role": "user", "content": "say 1"}])
    assert rollout.samples[0].tokens[: len(expected)].tolist() == expected
    assert rollout.text == (("user", "say 1"), ("assistant", "answer 0"))
    assert load_classic(env).prompt_tokens(0) == len(expected)


class Chat(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="again " * 10)]


CHAT = Chat(dataset=DATA, rubric=vf.Rubric(funcs=[fine]), max_turns=9)


async def test_conversation_that_exceeds_seq_len_is_truncated(play_classic):
    (whole,) = await play_classic(CHAT, seq_len=2000)
    (cut,) = await play_classic(CHAT, seq_len=150)
    assert (whole.is_truncated, whole.metrics["num_turns"]) == (False, 9)
    assert cut.is_truncated and 1 <= cut.metrics["num_turns"] < 9
    assert max(len(sample) for sample in cut.samples) <= 150
    with pytest.raises(SampleTooLong):
        await play_classic(CHAT, seq_len=12)


class Hanging(vf.MultiTurnEnv):
    """Never ends after so many turns; its cleanup takes longer than the limit."""

    def __init__(self, turns, **kwargs):
        super().__init__(dataset=DATA, rubric=vf.Rubric(funcs=[fine]), max_turns=3, **kwargs)
        self.turns = turns

    async def setup_state(self, state, **kwargs):
        if self.turns == 0:
            await asyncio.Event().wait()
        return state

    async def env_response(self, messages, state, **kwargs):
        await asyncio.Event().wait()

    @vf.cleanup
    async def release(self, state):
        await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("own", "limits", "message"),
    [
        ({"timeout_seconds": 5}, {}, "a rollout ended before a completion: timeout_reached"),
        ({}, {"timeout_seconds": 5}, r"a rollout of example 1 took longer than 5 s \(env.timeout_seconds\)"),
    ],
)
@virtual_clock
async def test_rollout_that_exceeds_a_time_limit_is_truncated_and_scored_if_it_has_a_turn(
    play_classic, own, limits, message
):
    stuck, limits = [], limits | {"cleanup_seconds": 60}
    account = GroupAccount(on_stuck=lambda: stuck.append(1))
    (rollout,) = await play_classic(Hanging(1, **own), example=1, account=account, **limits)
    assert (rollout.reward, rollout.is_truncated, rollout.metrics["num_turns"]) == (1.0, True, 1)
    assert (stuck, account.discarded) == ([], {})
    with pytest.raises(EnvironmentFailed, match=message):
        await play_classic(Hanging(0, **own), example=1, **limits)


# Lost servers and broken workers


async def asks_policy(state):
    response = await state["client"].get_response(state["prompt"], "policy", {})
    return float("answer" in response.message.content)


async def asks_policy_or_zero(state):
    try:
        return await asks_policy(state)
    except vf.Error:
        return 0.0


async def group_asks_policy(states):
    return [await asks_policy(state) for state in states]


async def test_lost_server_is_reported_before_the_resulting_environment_error(play_classic):
    for env, lost_after in ((single(fine, broken), 1), (CHAT, 4)):
        with pytest.raises(InferenceServerLost, match="inference is gone"):
            await play_classic(env, count=3, lost_after=lost_after)


@pytest.mark.parametrize("function", [asks_policy, asks_policy_or_zero, group_asks_policy])
async def test_server_lost_in_a_reward_function_is_not_a_reward(play_classic, function):
    assert [rollout.reward for rollout in await play_classic(single(function), count=3)] == [1.0] * 3
    with pytest.raises(InferenceServerLost, match="inference is gone"):
        await play_classic(single(function), count=3, lost_after=5)


def test_broken_process_pool_exits_the_worker(load_classic):
    """MathRubric would count 0 for every answer from then on."""
    rubric = vf.MathRubric()
    rubric.executor.submit(int).result()
    adapter = load_classic(vf.SingleTurnEnv(dataset=DATA, rubric=rubric))

    def play():
        return asyncio.run(adapter.run_group(1, 1, NumberingEngine(), {"max_tokens": 9}, 256))

    assert play()[0].reward == 0, "a wrong answer"
    for process in list(rubric.executor._processes.values()):
        process.kill()
        process.join()
    with pytest.raises(SystemExit, match=r"the process pool of .*correct_answer.* is broken"):
        play()


# Packages that cannot be loaded


def load_module(tmp_path, monkeypatch, name, code):
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return worker_main.load(EnvConfig(id=name), None, "train")


def test_missing_classic_api_raises_with_the_install_command(load_classic, monkeypatch):
    find_spec = importlib.util.find_spec
    hidden = lambda name, *args: None if name == "verifiers.legacy" else find_spec(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError, match=r"uses the classic API, .*; run `uv pip install verifiers==0\.3\.2\.dev22`$"):
        load_classic(single(fine))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module_at_all", "cannot be imported: ModuleNotFoundError: No module named 'no_such_modul"),
        ("x = 1", r"defines no load_environment\(\); write"),
        ("def load_environment(): return None", r"load_environment\(\) of environment 'faulty_\d+' returned NoneType"),
        (
            "def load_environment():\n  try: 1 / 0\n  except Exception as error: raise ValueError('bad') from error",
            r" does not load: ValueError: bad \(from ZeroDivisionError: division by zero\)$",
        ),
        (
            "from prime_rl import ConfigError\ndef load_environment(): raise ConfigError('data_path is missing')",
            r"^environment 'faulty_\d+' with env.args = {} does not load: data_path is missing$",
        ),
    ],
)
def test_package_that_does_not_load_raises_config_error(tmp_path, monkeypatch, code, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_module(tmp_path, monkeypatch, f"faulty_{crc32(code.encode())}", code)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["PythonEnv", "SandboxEnv"])
def test_verifiers_sandbox_environments_name_the_local_one(name, tmp_path, monkeypatch):
    code = f"""
import verifiers as vf
from datasets import Dataset

def load_environment():
    return vf.{name}(dataset=Dataset.from_list([{{"question": "", "answer": ""}}]), rubric=vf.Rubric())
"""
    monkeypatch.setattr("atexit.register", lambda *arguments: None)  # a half-constructed environment fails at the exit
    with pytest.raises(ConfigError, match=r"derive .* from prime_rl_sandbox.python_env.PythonEnv") as error:
        load_module(tmp_path, monkeypatch, f"remote_{name.lower()}", code)
    assert "\n" not in str(error.value)
