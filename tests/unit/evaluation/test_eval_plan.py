"""From configuration to what is played."""

import importlib
import inspect

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.rollouts.eval_common import AnyServerConfig, EvalEnvConfig
from prime_rl.configs.shared.blocks import EnvConfig, SamplingConfig
from prime_rl.core.errors import ConfigError
from prime_rl.evaluation.benchmarks import BENCHMARKS, benchmark_environment
from prime_rl.evaluation.eval_plan import choose_examples, plan_tasks
from prime_rl.rollouts.environments import environment_id


def test_choose_examples_larger_choice_contains_the_smaller():
    few, many = choose_examples(100, 10, seed=3), choose_examples(100, 40, seed=3)
    assert set(few) < set(many)
    assert few == sorted(few)
    assert choose_examples(100, 10, seed=4) != few
    assert choose_examples(5, -1, seed=0) == choose_examples(5, 9, seed=0) == [0, 1, 2, 3, 4]


def test_plan_environment_settings_take_precedence():
    own = EvalEnvConfig(id="a", num_examples=3, rollouts_per_example=8, sampling={"temperature": 0.0})
    first, second = plan_tasks([own, EvalEnvConfig(id="b")], [], SamplingConfig(max_tokens=9), 16, 2)
    assert (first.num_examples, first.rollouts, first.sampling.temperature, first.sampling.max_tokens) == (3, 8, 0.0, 9)
    assert (second.num_examples, second.rollouts, second.sampling.temperature) == (16, 2, 1.0)
    assert set(own.as_env_config().model_dump()) == set(EnvConfig.model_fields)


def test_plan_benchmarks_come_last_with_their_rollout_counts():
    plays = plan_tasks([EvalEnvConfig(id="a")], ["math500", "aime24"], SamplingConfig(), -1, 1, [1, 16])
    assert [(item.name, item.rollouts) for item in plays] == [("a", 1), ("math500", 1), ("aime24", 16)]


@pytest.mark.parametrize(
    ("environments", "named", "message"),
    [
        ([], [], "no environment to run"),
        ([EvalEnvConfig(id="a"), EvalEnvConfig(id="a")], [], "two environments are called 'a'"),
        ([EvalEnvConfig(id="a", sampling={"temprature": 1})], [], "env.sampling of environment 'a': temprature"),
        (
            [],
            ["math400"],
            "no benchmark 'math400'; known benchmarks: aime24, aime25, gsm8k, humaneval, humanevalplus, live",
        ),
    ],
)
def test_plan_invalid_input_raises_config_error(environments, named, message):
    with pytest.raises(ConfigError, match=message):
        plan_tasks(environments, named, SamplingConfig(), -1, 1)


def test_missing_benchmark_raises_with_the_install_command(monkeypatch):
    with pytest.raises(ConfigError, match=r"run `prime env install primeintellect/livecodebench`$"):
        benchmark_environment("livecodebench")
    monkeypatch.setattr(environment_id, "_find_installed", lambda module: None)
    with pytest.raises(ConfigError, match=r"run `uv pip install -e environments/hendrycks_math`$"):
        benchmark_environment("math500")


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"livecodebench"}))
def test_benchmark_arguments_exist_in_the_environment(name):
    environment = benchmark_environment(name)
    load = importlib.import_module(environment.id).load_environment
    inspect.signature(load).bind(**environment.args)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "http://localhost:8000/v1"),
        ("http://box:1", "http://box:1/v1"),
        ("http://box:1/v1/", "http://box:1/v1"),
        ("https://x.org/openai/v2", "https://x.org/openai/v2"),
    ],
)
def test_chat_url(given, expected):
    config = AnyServerConfig() if given is None else AnyServerConfig(base_url=[given])
    assert config.chat_url(0) == expected


def test_benchmark_data_replaces_the_hub(tmp_path):
    for name, suffix in (("humaneval", "jsonl"), ("livecodebench", "json"), ("gsm8k", "parquet")):
        (tmp_path / f"{name}.{suffix}").touch()
    tasks = plan_tasks([], ["humaneval", "livecodebench", "gsm8k"], SamplingConfig(), -1, 1, benchmark_data=tmp_path)
    assert [(task.name, task.env.id, task.env.args["data_path"]) for task in tasks] == [
        ("humaneval", "code_tests", str(tmp_path / "humaneval.jsonl")),
        ("livecodebench", "code_tests", str(tmp_path / "livecodebench.json")),
        ("gsm8k", "gsm8k", str(tmp_path / "gsm8k.parquet")),
    ]
    with pytest.raises(ConfigError, match=rf"benchmark_data has no {tmp_path}/mbpp.jsonl"):
        plan_tasks([], ["mbpp"], SamplingConfig(), -1, 1, benchmark_data=tmp_path)


def test_documented_benchmarks_exist():
    config = EvalConfig.load(["--benchmarks", "math500,aime24,aime25"])
    assert [item.env.id for item in plan_tasks(config.env, config.benchmarks, config.sampling, -1, 1)] == [
        "hendrycks_math"
    ] * 3
