"""An environment gives the same rollouts, scores and errors in an interpreter of its own as in its worker."""

import asyncio
import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_id import identify_environments
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.separate import interpreters
from prime_rl.rollouts.separate.crash_record import WorkerUnusable
from prime_rl.rollouts.separate.interpreter_server import InterpreterServer
from prime_rl.rollouts.separate.interpreters import needs_interpreter, write_lock
from prime_rl.rollouts.workers import worker_main
from tests.support.wheels import make_wheel
from tests.unit.rollouts.conftest import PACKAGES, encode, ending_server, generation

ENVIRONMENT = """
import asyncio
import functools
import json
import os
import verifiers as vf
from datasets import Dataset

CASES = (
    "fine", "two turns", "none", "raises", "raises for one", "dictionary", "metric fails", "short group", "empty",
    "connection", "too long", "infinite", "leaves", "panics", "cancels itself",
)


class Panic(BaseException):
    pass


def case(info):
    return info["case"]


def number(completion):
    return float(completion[-1]["content"].split()[-1]) if completion[-1]["content"] else -1.0


async def reward(completion, answer, info):
    await asyncio.sleep(0)
    if case(info) == "none":
        return None
    if case(info) == "raises" or (case(info) == "raises for one" and number(completion) % 3 == 1):
        raise KeyError("cannot grade")
    if case(info) == "connection":
        raise ConnectionError("no judge here")
    if case(info) == "infinite":
        return float("inf")
    if case(info) == "leaves":
        raise SystemExit(3)
    if case(info) == "panics":
        raise Panic("out of bounds")
    if case(info) == "cancels itself":
        raise asyncio.CancelledError("not by the worker")
    return number(completion) + int(answer)


def details(completion, info, **kwargs):
    if case(info) == "metric fails":
        raise ValueError("no details")
    return {"dicts": all(isinstance(message, dict) for message in completion), "bad": "text", "turns": len(completion)}


def ranks(completions, infos):
    if case(infos[0]) == "short group":
        return [1.0]
    order = sorted(map(number, completions))
    return [order.index(number(completion)) for completion in completions]


def graded(prompt, completion, info):
    if case(info) != "dictionary":
        return {"score": 0.0}
    return {"score": 0.5, "length": len(json.dumps([dict(message) for message in [*prompt, *completion]]))}


class Chat(vf.MultiTurnEnv):
    @vf.stop
    async def enough(self, state):
        wanted = {"two turns": 2, "too long": 99, "waits": 2}.get(state["info"]["case"], 1)
        return len(state["trajectory"]) >= wanted

    async def env_response(self, messages, state, **kwargs):
        if state["info"]["case"] == "waits":
            await asyncio.Event().wait()
        return [{"role": "user", "content": "again " * 20}]


def listed(**kwargs) -> list:
    return [len(kwargs["states"])] * len(kwargs["states"])


def scaled(completion, factor):
    return factor


class OwnRollout(vf.Rubric):
    async def score_rollout(self, state):
        state["reward"], state["metrics"] = 0.75, {"own": 0.75}


class Summed(vf.Rubric):
    async def score_group(self, states):
        for state in states:
            state["reward"], state["metrics"] = sum(number(each["completion"]) for each in states), {}


def rubric_of(kind):
    functions = {"listed": [listed], "partials": [functools.partial(scaled, factor=n) for n in (1.0, 2.0)]}
    if kind in functions:
        return vf.Rubric(funcs=functions[kind])
    if kind == "group":
        return vf.RubricGroup([vf.Rubric(funcs=[reward]), vf.Rubric(funcs=[ranks], weights=[0.5])])
    return {"own score_rollout": OwnRollout, "summed": Summed}[kind](funcs=[reward])


def load_environment(cases=CASES, error=None, kind=None):
    if kind == "advantages":
        rubric = type("Advantages", (vf.Rubric,), {"has_advantages": True})(funcs=[reward])
        return Chat(dataset=Dataset.from_list([{"question": "a", "answer": "1"}]), rubric=rubric)
    if kind == "no answers":
        rubric = vf.Rubric(funcs=[lambda completion, answer: 1.0])
        return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "a"}]), rubric=rubric)
    if kind == "hook":
        hooked = type("Hooked", (Chat,), {"run_group": lambda self: None})
        return hooked(dataset=Dataset.from_list([{"question": "a", "answer": "1"}]), rubric=vf.Rubric(funcs=[reward]))
    if kind is not None and kind.startswith("EnvGroup"):
        rows = [{"question": "say 0", "answer": "0", "info": {"case": "fine"}}]
        rubrics = [vf.Rubric(funcs=[reward]), vf.Rubric(funcs=[graded])]
        members = [vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric) for rubric in rubrics]
        group = vf.EnvGroup(members[::-1] if kind == "EnvGroup, second" else members, env_names=["a", "b"])
        if kind == "EnvGroup, functions":
            group.rubric.add_reward_func(graded)
        if kind == "EnvGroup, replaced":
            group.rubric = rubric_of("group")
        if kind == "EnvGroup, added":  # 0.1.8 has no add_rubric()
            added = vf.Rubric(funcs=[ranks, graded], weights=[0.5, 2.0])
            group.rubric = vf.RubricGroup([group.rubric, added])
        if kind != "EnvGroup, inner":
            return group
        group.rubric = vf.RubricGroup([group.rubric, rubric_of("listed")])
        return vf.EnvGroup([group], env_names=["c"])
    if kind is not None:
        rows = [{"question": "say 0", "answer": "0", "info": {"case": "fine"}}]
        return Chat(dataset=Dataset.from_list(rows), rubric=rubric_of(kind))
    if error is not None:
        raise ValueError(error)
    rows = [{"question": f"say {i}", "answer": str(i), "info": {"case": name}} for i, name in enumerate(cases)]
    if "exits" in cases:
        os._exit(3)
    rubric = vf.Rubric(funcs=[reward, details, ranks, graded], weights=[1.0, 0.0, 0.5, 2.0])
    return Chat(dataset=Dataset.from_list(rows), rubric=rubric)
"""
CASES = (
    *("fine", "two turns", "none", "raises", "raises for one", "dictionary", "metric fails", "short group", "empty"),
    *("connection", "too long", "infinite", "leaves", "panics", "cancels itself"),
)


class SeededEngine:
    """Answers with a number that follows from the seed of the call: calls of several rollouts come in any order."""

    def __init__(self, is_empty=False):
        self.is_empty = is_empty

    async def generate(self, prompt_ids, sampling):
        return generation(encode("" if self.is_empty else f"word {sampling['seed'] % 7}"), version=3)


@pytest.fixture
def load(tmp_path, renderer):
    file = tmp_path / "chat_environment.py"
    file.write_text(textwrap.dedent(ENVIRONMENT))

    def loaded(interpreter=sys.executable, **keys):
        warnings.clear()
        config = EnvConfig(id=str(file), interpreter=interpreter, num_retries=0, **keys)
        return worker_main.load(config, renderer, "train", False, warnings.append)

    warnings = loaded.warnings = []
    yield loaded
    sys.modules.pop("chat_environment", None)


def plain(rollout):
    """Return everything of a rollout as plain values."""
    samples = [[array.tolist() for array in (s.tokens, s.loss_mask, s.logprobs, s.versions)] for s in rollout.samples]
    return rollout.reward, sorted(rollout.metrics.items()), rollout.is_truncated, rollout.answer, rollout.text, samples


async def run_group(environment, example=0, count=3, seq_len=256, is_empty=False):
    return await environment.run_group(example, count, SeededEngine(is_empty), {"max_tokens": 9}, seq_len, [1, 2])


async def results_of(environment):
    """Return, by case, the rollouts of a group of three as plain values, or the error."""
    found = {}
    for example, case in enumerate(CASES):
        try:
            rollouts = await run_group(environment, example, is_empty=case == "empty")
        except (EnvironmentFailed, SampleTooLong) as error:
            found[case] = (type(error), str(error), getattr(error, "is_infrastructure", None))
            continue
        found[case] = sorted(map(plain, rollouts))
    return found


async def test_results_equal_those_in_the_worker(load):
    expected = await results_of(load(interpreter=None, min_rollouts=1))
    own_warnings = list(load.warnings)
    environment = load(min_rollouts=1)
    assert len(environment) == len(CASES)
    assert environment.prompt_tokens(0) > 0
    assert await results_of(environment) == expected
    assert load.warnings == [text for text in own_warnings if "'bad' of" not in text]
    assert [len(expected[case]) for case in ("fine", "raises for one", "empty")] == [3, 2, 3]
    assert expected["connection"][2], "a lost connection is worth a retry"


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fine", "toy"])
async def test_rewards_of_the_configuration_are_added_as_in_the_worker(renderer, load, kind):
    functions = [("is_long", 0.5, {"least": 3}), ("of_column", 0.0, {}), ("fails", 1.0, {})]
    rewards = [{"import_path": f"tests.support.rewards:{name}", "weight": weight, "kwargs": kwargs}
               for name, weight, kwargs in functions]  # fmt: skip
    results = []
    for interpreter in (None, sys.executable):
        keys = {"rewards": rewards, "reward_errors": "zero", "interpreter": interpreter}
        if kind == "fine":
            environment = load(args={"cases": ["fine"]}, **keys)
        else:
            config = EnvConfig(id=str(PACKAGES / "toy_taskset.py"), **keys)
            environment = worker_main.load(config, renderer, "train", False, load.warnings.append)
        async with ending_server(environment):
            rollouts = await run_group(environment, count=2)
        results.append((sorted(map(plain, rollouts)), sorted(rollouts[0].weights.items())))
    assert results[0] == results[1]
    assert {"is_long", "of_column", "fails"} <= dict(results[0][1]).keys()


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind",
    ["listed", "partials", "group", "own score_rollout", "summed", "EnvGroup", "EnvGroup, second", "EnvGroup, added"],
)
async def test_rubrics_score_as_in_the_worker(load, kind):
    results = []
    for interpreter in (None, sys.executable):
        environment = load(interpreter, args={"kind": kind})
        rollouts = await run_group(environment)
        results.append((sorted(map(plain, rollouts)), rollouts[0].weights))
    assert results[0] == results[1]


@pytest.mark.extended(after=1)
@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"args": {"cases": ["exits"]}}, "the interpreter of the environment ended with code 3"),
        ({"args": {"error": "no such data"}}, "does not load: ValueError: no such data"),
        ({"args": {"cases": []}}, "has no train examples"),
        ({"args": {"kind": "advantages"}}, "it computes advantages"),
        ({"args": {"kind": "no answers"}}, "have no column 'answer'"),
        ({"args": {"kind": "hook"}}, r"it overrides run_group\(\)"),
        ({"args": {"kind": "EnvGroup, functions"}}, "adds functions to the rubric of an EnvGroup, which ignores them"),
        ({"args": {"kind": "EnvGroup, replaced"}}, "it replaces the rubric of an EnvGroup"),
        ({"args": {"kind": "EnvGroup, inner"}}, "or adds one to an EnvGroup in another one"),
        ({"rewards": [{"import_path": "tests.support.rewards:of_state"}]}, "of_state takes 'state'"),
    ],
)
def test_environment_that_does_not_load_is_refused(load, keys, problem):
    with pytest.raises(ConfigError, match=problem):
        load(**keys)


ASKING = """
import asyncio
import openai
import verifiers as vf
from datasets import Dataset


async def ask(client, **keys):
    messages = [{"role": "user", "content": "rate it"}]
    answer = await client.chat.completions.create(**{"model": "policy", "messages": messages, **keys})
    return len(answer.choices[0].message.content)


async def ways(state):
    client = state["client"].client
    messages = [{"role": "user", "content": "a"}]
    raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
    assert raw.parse().choices[0].finish_reason == "stop"
    for refused in ({"messages": [{"role": "user"}, {}]}, {"stream": True}, {"extra_body": {"messages": 3}}):
        try:
            await ask(client, **refused)
            return 0.0
        except openai.BadRequestError as error:
            assert error.status_code == 400 and error.body["message"]
    own = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    return float(all([
        await ask(client),
        await ask(client, extra_body={"max_tokens": 3}, timeout=60, extra_headers={"X-A": "1"}),
        await ask(own),
        await asyncio.to_thread(lambda: asyncio.run(ask(client))),
    ]))


def load_environment():
    rows = Dataset.from_list([{"question": "a", "answer": "1"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[ways]))
"""


async def test_reward_functions_ask_the_policy_in_any_way(tmp_path, renderer):
    file = tmp_path / "asking_environment.py"
    file.write_text(ASKING)
    config = EnvConfig(id=str(file), interpreter=sys.executable)
    environment = worker_main.load(config, renderer, "train")
    rollouts = await run_group(environment)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3
    assert [len(rollout.samples) for rollout in rollouts] == [1] * 3, "calls of reward functions are not trained on"
    assert not environment._runner._requests


@pytest.mark.extended
async def test_time_limit_cancellation_and_death(load):
    environment = load(args={"cases": ["waits", "fine"]}, timeout_seconds=1, cleanup_seconds=60)
    [late] = await run_group(environment, count=1)
    assert late.is_truncated
    assert late.metrics["details/turns"] == 1.0, "the completion is the first turn"
    assert late.samples[0].loss_mask.any()

    environment.config = environment.config.model_copy(update={"timeout_seconds": None})
    task = asyncio.create_task(run_group(environment, count=1))
    while len(environment._runner._calls) < 1:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not environment._runner._calls, "each call was answered"

    [fine] = await run_group(environment, 1, 1)
    assert fine.metrics["details/dicts"] == 1.0
    os.kill(InterpreterServer.of(sys.executable)._process.pid, signal.SIGKILL)
    await asyncio.to_thread(environment._runner._process.wait)
    for _ in range(2):
        with pytest.raises(WorkerUnusable, match="the interpreter of the environment has ended"):
            await environment._runner.call("row", example=1)


@pytest.mark.parametrize(
    ("keys", "needed"),
    [
        ({}, False),
        ({"requirements": ["numpy"]}, False),
        ({"package": "verifiers>=0.3.2.dev22", "requirements": ["numpy>1"]}, False),
        ({"requirements": ["numpy", "verifiers<0.2"]}, True),
        ({"package": "no-such-package-of-ours"}, True),
        ({"package": "./my_env"}, True),
        ({"python": f"3.{sys.version_info.minor}"}, False),
        ({"python": "3.1"}, True),
    ],
)
def test_interpreter_is_needed_for_what_this_one_lacks(keys, needed):
    assert needs_interpreter(EnvConfig(**keys)) == needed


def test_kept_lock_is_not_used_for_another_api_or_changed_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "p k").mkdir()
    resolved = []

    def resolve(uv, requirements, python, what):
        resolved.append(requirements)
        version = "0.3.1" if interpreters.WITH_CLASSIC_API in requirements else "0.4.0"
        return f"verifiers=={version}\nlocal @ {folder.as_uri()}\n"

    installed = []

    def install(uv, lock, *_):
        installed.append("0.3.1" if "0.3.1" in lock else "0.4.0")
        return tmp_path / "bin/python"

    monkeypatch.setattr(interpreters, "_resolve", resolve)
    monkeypatch.setattr(interpreters, "_install", install)
    env = EnvConfig(id="own.py", requirements=["verifiers", str(folder)])

    def prepare(text):
        (tmp_path / "own.py").write_text(text)
        count = len(resolved)
        interpreters.prepare_interpreter(env, "env", tmp_path / "own.py", None, lambda line: None)
        return installed[-1], len(resolved) > count

    assert prepare("__all__ = ['A']") == ("0.4.0", True)
    assert prepare("def load_environment(): ...") == ("0.3.1", True)
    assert prepare("__all__ = ['A']") == ("0.4.0", False)
    assert prepare("def load_environment(): ...") == ("0.3.1", False)
    (folder / "pyproject.toml").write_text("")
    assert prepare("def load_environment(): ...") == ("0.3.1", True)


def test_python_that_uv_does_not_find_is_the_newest_of_pyenv_or_refused(tmp_path, monkeypatch):
    for name, value in {"XDG_CACHE_HOME": tmp_path, "PYENV_ROOT": tmp_path, "UV_OFFLINE": 1}.items():
        monkeypatch.setenv(name, str(value))
    env = EnvConfig(id="tiny_environment", package=str(make_wheel(tmp_path)), python="3.99")
    with pytest.raises(ConfigError, match=r"^env\.0 .*: Python 3\.99 is not installed and .*`python`"):
        identify_environments([env], "env", pytest.fail, list)
    for name in ("3.99.9", "3.99.10", "3.99.11rc1", "3.9.2"):
        (tmp_path / "versions" / name / "bin").mkdir(parents=True)
        (tmp_path / "versions" / name / "bin/python").touch()
    assert interpreters._find_python("uv", "3.99") == str(tmp_path / "versions/3.99.10/bin/python")


def test_interpreter_is_made_once_and_again_from_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    env = EnvConfig(id="tiny_environment", package=str(make_wheel(tmp_path)))
    lines = []

    def identify(locks=None):
        lines.clear()
        return identify_environments([env], "env", pytest.fail, lines.append, locks)[0]

    first = identify()
    assert [line.split(": ")[1].split()[0] for line in lines] == ["resolving", "installing"]
    assert identify() == first
    assert lines == [], "neither resolved nor installed again"

    write_lock(first, tmp_path / "locks")
    shutil.rmtree(Path(first.interpreter).parents[1])
    (tmp_path / "tiny_environment-1.0-py3-none-any.whl").rename(tmp_path / "moved.whl")
    with pytest.raises(ConfigError, match=r"env\.0 \(tiny_environment\): its packages cannot be resolved: .*1\.0-py3"):
        identify()
    (tmp_path / "moved.whl").rename(tmp_path / "tiny_environment-1.0-py3-none-any.whl")
    assert identify(tmp_path / "locks") == first
    assert [line.split(": ")[1].split()[0] for line in lines] == ["installing"], "the lock needs no resolution"

    with pytest.raises(ConfigError, match="verifiers is not among its requirements"):
        worker_main.load(first, None, "train")


@pytest.mark.extended
@pytest.mark.parametrize("release", ["0.1.8", "0.1.10", "0.1.12", "0.2.0", "0.3.1"])
async def test_results_are_those_of_every_release_of_verifiers(load, tmp_path, release):
    """Needs a package index, or packages in uv's cache."""
    expected = await results_of(load(interpreter=None, min_rollouts=1))
    env = EnvConfig(id=str(tmp_path / "chat_environment.py"), requirements=[f"verifiers=={release}"])
    [env] = identify_environments([env], "env", pytest.fail, print)
    found = await results_of(load(interpreter=env.interpreter, min_rollouts=1))
    for results, interpreter in ((expected, None), (found, env.interpreter)):
        group = await run_group(load(interpreter=interpreter, args={"kind": "EnvGroup, added"}))
        results["EnvGroup"] = sorted(map(plain, group))
    for results in (expected, found):  # 0.1.8 does not count turns; not each release says why a prompt is refused
        results.pop("too long")
        for case in results:
            if isinstance(results[case], list):
                results[case] = [
                    (reward, [pair for pair in metrics if pair[0] != "num_turns"], *rest)
                    for reward, metrics, *rest in results[case]
                ]
    assert found == expected


TASKSETS = [
    *(("toy_taskset", {"task": {"fail": fail}}) for fail in (None, "setup", "reward", "nan")),
    ("toy_taskset", {"env": {"agent": {"sampling": {"stop": "d", "temperature": 0.2}}}}),
    *(("toy_taskset", {"task": {"fail": fail}}, {"reward_errors": "zero"}) for fail in ("nan", "unweighted")),
    ("talking_taskset", {}),
    ("talking_taskset", {"env": {"train_both": True}}),
    ("rewriting_taskset", {}),
]


async def results_of_tasksets(renderer, interpreter):
    """Return, by number, the rollouts of a group of each taskset as plain values, or the error; and the warnings."""
    found, warnings = [], []
    for name, args, *keys in TASKSETS:
        keys = {"id": str(PACKAGES / f"{name}.py"), "args": args, **(keys[0] if keys else {})}
        config = EnvConfig(interpreter=interpreter, num_retries=0, **keys)
        environment = worker_main.load(config, renderer, "train", False, warnings.append)
        async with ending_server(environment):
            for seq_len in (256, 40):
                try:
                    rollouts = await run_group(environment, seq_len=seq_len)
                except (EnvironmentFailed, SampleTooLong) as error:
                    found.append((type(error), str(error)[:40], getattr(error, "is_infrastructure", None)))
                    continue
                results = [(plain(rollout), rollout.weights, len(rollout.credits or ())) for rollout in rollouts]
                found.append(sorted(results, key=repr))
    return found, warnings


@pytest.mark.extended
@pytest.mark.parametrize("release", [None, "0.4.0"])
async def test_results_of_all_tasksets_equal_those_in_the_worker(renderer, release):
    """With a release it needs a package index, or packages in uv's cache."""
    interpreter = sys.executable
    if release is not None:
        env = EnvConfig(id=str(PACKAGES / "toy_taskset.py"), requirements=[f"verifiers=={release}"])
        [env] = identify_environments([env], "env", pytest.fail, print)
        interpreter = env.interpreter
    expected, warnings = await results_of_tasksets(renderer, None)
    found = await results_of_tasksets(renderer, interpreter)
    assert found == (expected, warnings)
    assert len(warnings) == 3 and "temperature = 0.2" in warnings[0] and "right is nan" in warnings[1]


@pytest.mark.extended(after=1)
@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("toy_taskset", {"args": {"endless": True}}, "is infinite; set env.args.env.num_tasks"),
        ("toy_taskset", {"args": {"exampels": 3}}, "does not load: .*exampels"),
        ("toy_taskset", {"step_rewards": "add"}, "needs a classic environment"),
        ("proposer_solver", {}, "there is no such file"),
    ],
)
def test_taskset_that_cannot_run_in_its_own_interpreter_is_refused(renderer, name, keys, problem):
    config = EnvConfig(id=str(PACKAGES / f"{name}.py"), interpreter=sys.executable, **keys)
    with pytest.raises(ConfigError, match=problem):
        worker_main.load(config, renderer, "train")
