"""From configuration to what is played."""

import importlib
import inspect

import pytest

from prime_rl.configs import EvalConfig
from prime_rl.configs.playing import AnyServerConfig, PlayedEnvConfig
from prime_rl.configs.shared import EnvConfig, SamplingConfig
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.evals import benchmarks
from prime_rl.orchestrator.evals.benchmarks import BENCHMARKS, benchmark_environment
from prime_rl.orchestrator.evals.workloads import choose_examples, plan


def test_more_examples_include_the_fewer():
    few, many = choose_examples(100, 10, seed=3), choose_examples(100, 40, seed=3)
    assert set(few) < set(many)
    assert few == sorted(few)
    assert choose_examples(100, 10, seed=4) != few
    assert choose_examples(5, -1, seed=0) == choose_examples(5, 9, seed=0) == [0, 1, 2, 3, 4]


def test_what_an_environment_says_for_itself_goes_first():
    own = PlayedEnvConfig(id="a", num_examples=3, rollouts_per_example=8, sampling={"temperature": 0.0})
    first, second = plan([own, PlayedEnvConfig(id="b")], [], SamplingConfig(max_tokens=9), 16, 2)
    assert (first.num_examples, first.rollouts, first.sampling.temperature, first.sampling.max_tokens) == (3, 8, 0.0, 9)
    assert (second.num_examples, second.rollouts, second.sampling.temperature) == (16, 2, 1.0)
    assert set(own.plain().model_dump()) == set(EnvConfig.model_fields)


def test_benchmarks_come_behind_with_their_own_numbers():
    plays = plan([PlayedEnvConfig(id="a")], ["math500", "aime24"], SamplingConfig(), -1, 1, [1, 16])
    assert [(item.name, item.rollouts) for item in plays] == [("a", 1), ("math500", 1), ("aime24", 16)]


@pytest.mark.parametrize(
    ("environments", "named", "message"),
    [
        ([], [], "no environment to play"),
        ([PlayedEnvConfig(id="a"), PlayedEnvConfig(id="a")], [], "two environments are called 'a'"),
        ([PlayedEnvConfig(id="a", sampling={"temprature": 1})], [], "env.sampling of environment 'a': temprature"),
        ([], ["math400"], "no benchmark 'math400'; known are aime24, aime25, gsm8k, livecodebench, math500"),
    ],
)
def test_what_cannot_be_played_is_one_line(environments, named, message):
    with pytest.raises(ConfigError, match=message):
        plan(environments, named, SamplingConfig(), -1, 1)


def test_a_benchmark_that_is_not_installed_gives_the_command(monkeypatch):
    with pytest.raises(ConfigError, match=r"run `prime env install primeintellect/livecodebench`$"):
        benchmark_environment("livecodebench")
    monkeypatch.setattr(benchmarks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run `uv pip install -e environments/hendrycks_math`$"):
        benchmark_environment("math500")


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"livecodebench"}))
def test_a_benchmark_gives_its_environment_arguments_that_it_has(name):
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
def test_the_address_of_the_chat_routes(given, expected):
    config = AnyServerConfig() if given is None else AnyServerConfig(base_url=[given])
    assert config.chat_url(0) == expected


def test_the_documented_line_names_benchmarks_that_exist():
    config = EvalConfig.load(["--benchmarks", "math500,aime24,aime25"])
    assert [item.env.id for item in plan(config.env, config.benchmarks, config.sampling, -1, 1)] == [
        "hendrycks_math"
    ] * 3
