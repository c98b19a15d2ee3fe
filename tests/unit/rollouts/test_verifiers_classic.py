"""Every kind of classic environment and rubric through the adapter: what verifiers counts as 0 is an error here."""

import asyncio
import importlib.util
import sys
import textwrap

import numpy as np
import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.clients.inference_client import InferenceServerLost
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.rendering.messages import Generation
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from tests.support.tiny_model import make_tokenizer
from tests.support.virtual_clock import virtual_clock

ENVIRONMENTS = '''
import asyncio
import verifiers as vf
from datasets import Dataset
from prime_rl.rollouts.clients.inference_client import InferenceServerLost

ROWS = [{"question": f"say {i}", "answer": str(i)} for i in range(4)]


def fine(answer, **kwargs):
    return float(answer)


def broken(completion, **kwargs):
    raise KeyError("broken reward")


async def broken_later(completion):
    await asyncio.sleep(0)
    raise KeyError("broken reward")


def none(completion):
    return None


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


async def asks_policy(state):
    response = await state["client"].get_response(state["prompt"], "policy", {})
    return len(response.message.content)


async def asks_policy_or_zero(state):
    try:
        return await asks_policy(state)
    except vf.Error:
        return 0.0


async def group_asks_policy(states):
    return [await asks_policy(state) for state in states]


async def loses_server(state):
    raise InferenceServerLost("inference is gone")


def extra(info):
    route = info["env_id"]
    return {"a": 10.0, "b": 20.0, "xa": 30.0, "ya": 40.0}["".join(route)]


def hundred(completion):
    return 100.0


class Cleaning(vf.Rubric):
    cleaned = []

    @vf.cleanup
    async def release(self, state):
        self.cleaned.append(state["info"]["env_id"])


class Doubling(vf.RubricGroup):
    async def score_group(self, states):
        await super().score_group(states)
        for state in states:
            state["reward"] *= 2


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


class Judge:
    class chat:
        class completions:
            @staticmethod
            async def create(**kwargs):
                raise ConnectionError("no judge here")


def judged():
    rubric = vf.JudgeRubric(judge_client=Judge())

    async def verdict(judge, prompt, completion, answer, state):
        return float("yes" in await judge(prompt, completion, answer, state))

    rubric.add_reward_func(verdict)
    return rubric


async def slow(state):
    await asyncio.Event().wait()


class Late(vf.MultiTurnEnv):
    """Adds its reward function while it runs; a turn after the first never ends."""

    def __init__(self, wait=False, **kwargs):
        super().__init__(**kwargs)
        self.wait = wait

    async def setup_state(self, state, **kwargs):
        if self.wait == "first":
            await asyncio.Event().wait()
        if broken not in self.rubric._get_reward_funcs() and not self.wait:
            self.rubric.add_reward_func(broken)
        return state

    async def env_response(self, messages, state, **kwargs):
        if self.wait:
            await asyncio.Event().wait()
        return [vf.UserMessage(content="again " * 10)]


class Chat(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="again " * 10)]


def single(*funcs, **kwargs):
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=list(funcs)), **kwargs)


SINGLE_TURN = {
    "plain": [fine], "broken": [fine, broken], "broken later": [broken_later], "none": [none], "group": [fine, ranks],
    "broken group": [fine, broken_ranks], "short group": [short_ranks], "named group": [named_ranks],
    "nan group": [nan_ranks],
    "asks_policy": [asks_policy], "asks_policy_or_zero": [asks_policy_or_zero], "loses_server": [loses_server],
    "group_asks_policy": [group_asks_policy],
    # The second rollout cannot be graded; ranks and best depend on which rollouts there are.
    "partly broken": [broken_for_one, ranks, best],
}


def load_environment(kind):
    data = Dataset.from_list(ROWS)
    if kind in SINGLE_TURN:
        return single(*SINGLE_TURN[kind])
    match kind:
        case "no answers" | "no answers, own class":
            own = type("Own", (vf.SingleTurnEnv,), {})  # might set the answer during the rollout
            kind = vf.SingleTurnEnv if kind == "no answers" else own
            return kind(dataset=data.rename_column("answer", "solution"), rubric=vf.Rubric(funcs=[fine]))
        case "text prompt":
            rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(4)]
            return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[fine]))
        case "tokens":

            def total(state):
                tokens = state["trajectory"][0]["tokens"]
                assert tokens["prompt_mask"] == [0] * len(tokens["prompt_ids"])
                assert tokens["completion_mask"] == [1] * len(tokens["completion_logprobs"])
                return sum(tokens["prompt_ids"]) + 1000 * sum(tokens["completion_ids"])

            return single(total)
        case "rubric group":
            return vf.SingleTurnEnv(dataset=data, rubric=vf.RubricGroup([vf.Rubric([fine]), vf.Rubric([fine, broken])]))
        case "judge":
            return vf.SingleTurnEnv(dataset=data, rubric=judged())
        case "partly broken, own score_group":
            return vf.SingleTurnEnv(dataset=data, rubric=vf.RubricGroup([vf.Rubric([broken_for_one]), Best()]))
        case "broken metric":
            env = single(fine)
            env.rubric.add_metric(broken)
            return env
        case "added":
            return Late(dataset=data, rubric=vf.Rubric(funcs=[fine]), max_turns=1)
        case "env group":
            return vf.EnvGroup([single(fine), single(fine, fine)])
        case "nested env group" | "broken env group":
            inner = vf.EnvGroup([single(fine), single(fine, broken) if kind.startswith("broken") else single(fine)])
            return vf.EnvGroup([inner, vf.EnvGroup([single(fine, fine)])], env_names=["inner", "other"])
        case "added to env group":
            group = vf.EnvGroup([single(fine), single(fine, fine)], env_names=["a", "b"])
            group.add_rubric(Cleaning(funcs=[extra]))
            group.add_rubric(vf.Rubric(funcs=[ranks]))
            group.rubric.add_reward_func(hundred)
            group.envs[1].rubric.add_reward_func(hundred, weight=0.5)
            group.rubric.add_metric(broken)
            return group
        case "added to nested env group":
            groups = [vf.EnvGroup([single(fine), single(fine)], env_names=["a", "b"]) for _ in range(2)]
            groups[1].add_rubric(vf.Rubric(funcs=[hundred]))
            outer = vf.EnvGroup(groups, env_names=["x", "y"])
            outer.rubric = Doubling([outer.rubric, vf.Rubric(funcs=[extra])])
            return outer
        case "replaced rubric":
            group = vf.EnvGroup([single(fine)])
            group.rubric = vf.Rubric(funcs=[fine])
            return group
        case "added advantages":
            group = vf.EnvGroup([single(fine)])
            group.add_rubric(type("Advantages", (vf.Rubric,), {"has_advantages": True})(funcs=[fine]))
            return group
        case "chat":
            return Chat(dataset=data, rubric=vf.Rubric(funcs=[fine]), max_turns=9)
        case "unscored":
            return single(broken, score_rollouts=False)
        case "late":
            return Late(wait=True, timeout_seconds=1.0, dataset=data, rubric=vf.Rubric(funcs=[fine]), max_turns=3)
        case "too late":
            return Late(wait="first", timeout_seconds=0.2, dataset=data, rubric=vf.Rubric(funcs=[fine]), max_turns=3)
        case "math":
            rubric = vf.MathRubric()
            rubric.executor.submit(int).result()
            return vf.SingleTurnEnv(dataset=data, rubric=rubric)
'''


HINT = r'\(env\.reward_errors = "zero" counts it as 0, as verifiers does\)'


class StubEngine:
    """Answers every turn with the same completed word, with `numbers` also with the number of the call."""

    def __init__(self, renderer, lost_after=None, numbers=False):
        self.encode = renderer._encode
        self.numbers = numbers
        self.asked = 0
        self.lost_after = lost_after

    async def generate(self, prompt_ids, sampling):
        number, self.asked = self.asked, self.asked + 1
        await asyncio.sleep(0)
        if self.lost_after is not None and self.asked > self.lost_after:
            raise InferenceServerLost("inference is gone")
        ids = [*self.encode(f"word {number}" if self.numbers else "word"), 2]
        n = len(ids)
        return Generation(np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), False)


@pytest.fixture(scope="module")
def renderer():
    return Renderer(make_tokenizer())


@pytest.fixture
def load(tmp_path, monkeypatch, renderer):
    (tmp_path / "classic_environments.py").write_text(textwrap.dedent(ENVIRONMENTS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda kind, **keys: worker_main.load(
        EnvConfig(id="classic-environments", args={"kind": kind}, **keys), renderer, "train"
    )
    sys.modules.pop("classic_environments", None)


@pytest.fixture
def play(load, renderer):
    async def played(kind, example=1, count=3, seq_len=256, keys=None, **engine):
        environment = load(kind, **(keys or {}))
        return await environment.run_group(example, count, StubEngine(renderer, **engine), {"max_tokens": 9}, seq_len)

    return played


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *((kind, "broken raised KeyError: 'broken reward'") for kind in ("broken", "rubric group", "added")),
        ("broken later", "broken_later raised KeyError: 'broken reward'"),
        ("broken group", "broken_ranks raised KeyError: 'broken reward'"),
        ("short group", r"short_ranks returned \[1.0\] for a group of 3"),
        ("named group", r"named_ranks returned \{0: 1.0, 1: 0.0, 2: 0.5\} for a group of 3"),
        ("nan group", "nan_ranks is nan, not a finite number"),
    ],
)
async def test_failed_reward_function_fails_the_group_in_every_rubric(play, kind, message):
    with pytest.raises(EnvironmentFailed, match=f"^reward function {message} {HINT}$"):
        await play(kind)


async def test_a_reward_that_is_none_is_an_error(play):
    with pytest.raises(EnvironmentFailed, match=rf"^reward function none is None, not a number {HINT}$"):
        await play("none")


async def test_failed_judge_fails_the_group(play):
    with pytest.raises(EnvironmentFailed, match=r"reward function verdict raised RuntimeError: .*no judge here"):
        await play("judge")


async def test_the_group_is_scored_as_one(play):
    rollouts = await play("group")
    assert [rollout.reward for rollout in rollouts] == pytest.approx([1 + i / 3 for i in range(3)])
    assert rollouts[1].metrics == pytest.approx({"fine": 1.0, "ranks": 1 / 3, "num_turns": 1})


@pytest.mark.parametrize(
    ("kind", "example", "reward"),
    [
        ("env group", 1, 1.0),
        ("env group", 7, 6.0),
        ("nested env group", 1, 1.0),
        ("nested env group", 5, 1.0),
        ("nested env group", 11, 6.0),
    ],
)
async def test_groups_of_environments_are_scored_at_every_depth(play, kind, example, reward):
    """Every four examples are of another environment; the last one counts the answer twice."""
    rollouts = await play(kind, example=example, count=1)
    assert rollouts[0].reward == reward
    assert rollouts[0].text[0] == ("user", f"say {example % 4}")


async def test_rubrics_and_functions_that_are_added_to_an_env_group_count(play):
    """extra and hundred of the group, ranks 0, 1/2; the second environment counts the answer twice, and 50 more."""
    rollouts = await play("added to env group", example=1, count=2)
    assert [rollout.reward for rollout in rollouts] == [1 + 10 + 100, 1 + 10 + 100 + 0.5]
    assert rollouts[1].metrics == {"fine": 1, "num_turns": 1, "extra": 10, "ranks": 0.5, "hundred": 100}
    assert sys.modules["classic_environments"].Cleaning.cleaned == ["a", "a"]
    rollouts = await play("added to env group", example=7, count=2)
    assert [rollout.reward for rollout in rollouts] == [6 + 50 + 20 + 100, 6 + 50 + 20 + 100 + 0.5]


@pytest.mark.parametrize(("example", "reward"), [(1, 2 * (1 + 30)), (9, 2 * (1 + 100 + 40))])
async def test_rubrics_of_nested_env_groups_count_at_every_depth(play, example, reward):
    (rollout,) = await play("added to nested env group", example=example, count=1)
    assert rollout.reward == reward


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("replaced rubric", "replaces the rubric of an EnvGroup.*call add_rubric"),
        ("added advantages", "computes advan"),
    ],
)
def test_rubric_of_an_env_group_that_would_be_ignored_raises(load, kind, message):
    with pytest.raises(ConfigError, match=message):
        load(kind)


def test_examples_without_the_answer_that_a_reward_function_takes_raise(load):
    with pytest.raises(ConfigError, match=r"examples have no column 'answer' \(but .*'solution'.*function fine takes"):
        load("no answers")
    load("no answers, own class")


async def test_failed_reward_in_an_env_group_fails_the_group(play):
    assert (await play("broken env group", example=2))[0].reward == 2.0
    with pytest.raises(EnvironmentFailed, match="reward function broken raised KeyError"):
        await play("broken env group", example=6)


@pytest.mark.parametrize("kind", ["partly broken", "partly broken, own score_group"])
async def test_rollout_that_cannot_be_graded_does_not_take_part_in_rewards_of_the_group(play, kind):
    rollouts = await play(kind, count=4, keys={"min_rollouts": 2}, numbers=True)
    assert [rollout.metrics["best"] for rollout in rollouts] == [0, 0, 1]
    if kind == "partly broken":
        assert [rollout.metrics["ranks"] for rollout in rollouts] == pytest.approx([0, 1 / 3, 2 / 3])
    with pytest.raises(EnvironmentFailed, match="cannot grade"):
        await play(kind, count=4, keys={"min_rollouts": 4}, numbers=True)


async def test_unscored_rollouts_are_not_scored(play):
    assert (await play("unscored"))[0].reward == 0


async def test_plain_text_prompt_is_a_user_message(load, play, renderer):
    (rollout,) = await play("text prompt", count=1)
    expected = renderer.render([{"role": "user", "content": "say 1"}])
    assert rollout.samples[0].tokens[: len(expected)].tolist() == expected
    assert rollout.text == (("user", "say 1"), ("assistant", "word"))
    assert load("text prompt").prompt_tokens(1) == len(expected)


async def test_environments_see_the_tokens_of_their_turns(play):
    (rollout,) = await play("tokens", count=1)
    (sample,) = rollout.samples
    assert rollout.reward == sample.tokens[~sample.loss_mask].sum() + 1000 * sample.tokens[sample.loss_mask].sum()


async def test_conversation_that_exceeds_seq_len_is_truncated(play):
    (whole,) = await play("chat", count=1, seq_len=2000)
    (cut,) = await play("chat", count=1, seq_len=150)
    assert not whole.is_truncated
    assert cut.is_truncated
    assert whole.metrics["num_turns"] == 9
    assert 1 <= cut.metrics["num_turns"] < 9
    assert max(len(sample) for sample in cut.samples) <= 150
    with pytest.raises(SampleTooLong):
        await play("chat", count=1, seq_len=12)


@virtual_clock
async def test_environment_time_limit_truncates_unless_there_is_no_turn(play):
    (rollout,) = await play("late", count=1)
    assert rollout.is_truncated
    assert len(rollout.samples) == 1
    with pytest.raises(EnvironmentFailed, match="a rollout ended before a completion: timeout_reached"):
        await play("too late", count=1)


async def test_lost_server_is_reported_before_the_resulting_environment_error(play):
    with pytest.raises(InferenceServerLost, match="inference is gone"):
        await play("broken", lost_after=1)
    with pytest.raises(InferenceServerLost, match="inference is gone"):
        await play("chat", lost_after=4)


@pytest.mark.parametrize("kind", ["asks_policy", "asks_policy_or_zero", "group_asks_policy", "loses_server"])
async def test_server_lost_in_a_reward_function_is_not_a_reward(play, kind):
    if kind != "loses_server":
        assert [rollout.reward for rollout in await play(kind)] == [4.0] * 3
    with pytest.raises(InferenceServerLost, match="inference is gone"):
        await play(kind, lost_after=5)


def test_broken_process_pool_exits_the_worker(load, renderer):
    """MathRubric would count 0 for every answer from then on."""
    adapter = load("math")
    executor = adapter._env.rubric.rubrics[0].executor

    def play():
        return asyncio.run(adapter.run_group(1, 1, StubEngine(renderer), {"max_tokens": 9}, 256))

    assert play()[0].reward == 0, "a wrong answer"
    for process in list(executor._processes.values()):
        process.kill()
        process.join()
    with pytest.raises(SystemExit, match=r"the process pool of .*correct_answer.* is broken"):
        play()


def test_missing_classic_api_raises_with_the_install_command(load, monkeypatch):
    find_spec = importlib.util.find_spec
    hidden = lambda name, *args: None if name == "verifiers.legacy" else find_spec(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ConfigError, match=r"uses the classic API, .*; run `uv pip install verifiers==0\.3\.2\.dev22`$"):
        load("plain")


def test_package_that_cannot_be_imported_raises_config_error(tmp_path, monkeypatch, renderer):
    (tmp_path / "unimportable_environment.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: No module named 'no_such_modul"):
        worker_main.load(EnvConfig(id="unimportable-environment"), renderer, "train")


def test_missing_environment_raises_with_the_install_command(renderer):
    with pytest.raises(ConfigError, match=r"someone/no-such-env@1.0 is .*prime env install someone/no-such-env@1.0"):
        worker_main.load(EnvConfig(id="someone/no-such-env@1.0"), renderer, "train")


def test_own_error_of_an_environment_names_the_environment(tmp_path, monkeypatch):
    code = "from prime_rl import ConfigError\ndef load_environment():\n    raise ConfigError('data_path is missing')\n"
    (tmp_path / "refusing_env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as error:
        worker_main.load(EnvConfig(id="refusing_env"), None, "train")
    assert str(error.value) == "environment 'refusing_env' with env.args = {} does not load: data_path is missing"


@pytest.mark.parametrize("name", ["PythonEnv", "SandboxEnv"])
def test_verifiers_sandbox_environments_name_the_local_one(name, tmp_path, monkeypatch):
    code = f"""
import verifiers as vf
from datasets import Dataset

def load_environment():
    return vf.{name}(dataset=Dataset.from_list([{{"question": "", "answer": ""}}]), rubric=vf.Rubric())
"""
    (tmp_path / f"remote_{name.lower()}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("atexit.register", lambda *arguments: None)  # a half-constructed environment fails at the exit
    with pytest.raises(ConfigError, match=r"derive .* from prime_rl_sandbox.python_env.PythonEnv") as error:
        worker_main.load(EnvConfig(id=f"remote_{name.lower()}"), None, "train")
    assert "\n" not in str(error.value)
