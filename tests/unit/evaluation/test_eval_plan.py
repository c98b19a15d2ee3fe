"""From configuration to what is played."""

import importlib
import inspect
import json

import pytest

from prime_rl.configs.client import AnyServerConfig
from prime_rl.configs.environment import EnvConfig, EvalEnvConfig
from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.configs.sandbox import SandboxConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.evaluation import eval_session
from prime_rl.evaluation.eval_plan import BENCHMARKS, EvalTask, benchmark_environment, choose_examples, plan_tasks
from prime_rl.evaluation.eval_results import ExampleFailure, ExampleRow, ResultFile, RolloutRow, digest, open_results
from prime_rl.evaluation.eval_session import EvalSession
from prime_rl.rollouts import environment_id
from prime_rl.rollouts.clients.inference_client import LoadedVersion
from tests.unit.evaluation.fakes import FakePool


def test_choose_examples_larger_choice_contains_the_smaller():
    few, many = choose_examples(100, 10, seed=3), choose_examples(100, 40, seed=3)
    assert set(few) < set(many)
    assert few == sorted(few)
    assert choose_examples(100, 10, seed=4) != few
    assert choose_examples(5, -1, seed=0) == choose_examples(5, 9, seed=0) == [0, 1, 2, 3, 4]


def test_plan_environment_settings_take_precedence_and_benchmarks_come_last():
    own = EvalEnvConfig(id="a", num_examples=3, rollouts_per_example=8, sampling={"temperature": 0.0})
    named = ["math500", "aime24", "aime25"]
    plan = plan_tasks([own, EvalEnvConfig(id="b")], named, SamplingConfig(max_tokens=9), 16, 2, [1, 16, 4])
    first, second = plan[:2]
    assert (first.num_examples, first.rollouts, first.sampling.temperature, first.sampling.max_tokens) == (3, 8, 0.0, 9)
    assert (second.num_examples, second.rollouts, second.sampling.temperature) == (16, 2, 1.0)
    assert set(own.as_env_config().model_dump()) == set(EnvConfig.model_fields)
    assert [(task.name, task.rollouts) for task in plan[2:]] == list(zip(named, (1, 16, 4), strict=True))
    assert {task.env.id for task in plan[2:]} == {"hendrycks_math"}


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
    monkeypatch.setattr(environment_id, "_find_installed", lambda module: None)
    for benchmark, command in (
        ("livecodebench", "prime env install primeintellect/livecodebench"),
        ("math500", "uv pip install -e environments/hendrycks_math"),
    ):
        with pytest.raises(ConfigError, match=rf"run `{command}`$"):
            benchmark_environment(benchmark)


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"livecodebench"}))
def test_benchmark_arguments_exist_in_the_environment(name):
    environment = benchmark_environment(name)
    load = importlib.import_module(environment.id).load_environment
    inspect.signature(load).bind(**environment.args)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "http://127.0.0.1:8000/v1"),
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


# The settings of an evaluation: every key counts unless it is listed as one that no rollout depends on


LOADED = LoadedVersion(PolicyVersion(0, 3), "abc")
CHANGED = {
    "args": {"x": 1}, "rewards": [{"import_path": "my:reward"}], "identity": "other", "timeout_seconds": 7.0,
    "reward_errors": "zero", "step_rewards": "add", "runtime": "subprocess", "scoring_timeout_seconds": 5.0,
    "command": ["agent"], "agent": "my:agent", "gateway": "http://g:1", "harness": "codex",
}  # fmt: skip


def digest_of(env=None, loaded=LOADED, content="c", examples=4, **config):
    config = EvalConfig(env=[{"id": "e"} | (env or {})], **config)
    task = EvalTask(config.env[0], config.env[0].sampling_with(config.sampling), -1, config.rollouts_per_example)
    pool = FakePool(examples)
    pool.content_hash = content
    session = EvalSession(config, "chat" if loaded is None else "generate", None, [], "eval")
    return digest(session._settings(task, pool, loaded))


@pytest.mark.parametrize(
    "change",
    [
        {"sandbox": {"timeout_seconds": 1}}, {"sandbox": {"backend": "prime"}}, {"sandbox": {"memory_bytes": 2**28}},
        {"rendering": {"reasoning_parser": "think"}}, {"seq_len": 64}, {"sampling": {"top_p": 0.5}},
        {"tokenizer": {"name": "other"}}, {"tokenizer": {"trust_remote_code": True}}, {"model": {"name": "other"}},
        {"rollouts_per_example": 3}, {"content": "other"}, {"examples": 5},
        {"loaded": LoadedVersion(PolicyVersion(0, 3), "xyz")}, {"env": {"sampling": {"top_k": 5}}},
        *({"env": {key: CHANGED[key]}} for key in EvalEnvConfig.model_fields if key in CHANGED),
    ],
)  # fmt: skip
def test_setting_that_rollouts_depend_on_changes_the_digest(change):
    assert digest_of(**change) != digest_of()


@pytest.mark.parametrize(
    "change",
    [
        {"num_examples": 2}, {"seed": 3}, {"max_concurrent": 1}, {"workers_per_env": 2}, {"pass_at": [1]},
        {"env": {"name": "e2"}}, {"env": {"num_retries": 3}}, {"sandbox": {"max_running": 2}}, {"output_dir": "o"},
    ],
)  # fmt: skip
def test_setting_that_no_rollout_depends_on_keeps_the_digest(change):
    assert digest_of(**change) == digest_of()


def test_keys_of_prompts_count_by_their_content_and_only_where_prompts_are_rendered(tmp_path):
    template, digests = tmp_path / "t.jinja", set()
    for text in ("a", "b"):
        template.write_text(text)
        digests.add(digest_of(rendering={"chat_template": template}))
    assert len(digests) == 2
    assert digest_of(loaded=None, seq_len=64) == digest_of(loaded=None), "the server renders them"
    assert digest_of({"reward_errors": "zero"}, loaded=None) != digest_of(loaded=None)


def test_each_key_is_either_related_or_listed_and_exists():
    fields = EvalConfig.model_fields.keys() | SynthesizeConfig.model_fields.keys()
    assert fields >= eval_session._UNRELATED | eval_session._OF_PROMPTS
    assert set(EvalEnvConfig.model_fields) - eval_session._UNRELATED_OF_ENV <= CHANGED.keys() | {"id", "sampling"}
    assert set(EvalEnvConfig.model_fields) >= eval_session._UNRELATED_OF_ENV
    assert set(SandboxConfig.model_fields) >= eval_session._UNRELATED_OF_SANDBOX
    related = EvalConfig.model_fields.keys() - eval_session._UNRELATED - eval_session._OF_PROMPTS
    assert not related & (EvalEnvConfig.model_fields.keys() - eval_session._UNRELATED_OF_ENV), "one would hide another"


# What is on disk survives a kill at any byte; two writers never mix


ROWS = [
    ExampleRow(2, [RolloutRow(0.5, {"a": 1.0}, False, 3, [{"role": "user", "content": "né \n \u2028"}])]),
    ExampleRow(0, failure=ExampleFailure("environment", "KeyError: 'x'")),
    ExampleRow(7, [RolloutRow(1.0, {}, True, 9, [], [{"type": "function"}], 3, 4)]),
]


def write(path):
    with ResultFile(path) as results:
        for row in ROWS:
            results.add(row)


def test_result_file_returns_the_last_row_of_each_example_to_one_writer(tmp_path):
    write(tmp_path / "r.jsonl")
    with ResultFile(tmp_path / "r.jsonl") as results:
        assert results.rows == {row.example: row for row in ROWS}
        results.add(again := ExampleRow(0, ROWS[0].rollouts))
        with pytest.raises(RunError, match="written by another process"):
            ResultFile(tmp_path / "r.jsonl")
    with ResultFile(tmp_path / "r.jsonl") as results:
        assert results.rows[0] == again
    lines = (tmp_path / "r.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["example"] for line in lines[:-1]] == [2, 0, 7, 0]


def test_result_file_cut_at_any_byte_loses_at_most_the_last_row(tmp_path):
    write(tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    path = tmp_path / "cut.jsonl"
    ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    near = {at for end in ends for at in range(end - 2, end + 4)}
    for length in sorted(near | set(range(0, len(whole), 7))):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        with ResultFile(path) as results:
            assert list(results.rows.values()) == ROWS[:complete]
            results.add(ExampleRow(9, failure=ExampleFailure("refused", "late")))
        with ResultFile(path) as results:
            assert [row.example for row in results.rows.values()] == [row.example for row in ROWS[:complete]] + [9]


def test_open_results_other_settings_have_another_folder(tmp_path):
    one, other = {"sampling": {"temperature": 0.7}}, {"sampling": {"temperature": 0.8}}
    with open_results(tmp_path, one) as first, open_results(tmp_path, other) as second:
        assert first.path != second.path
        first.add(ROWS[0])
    with open_results(tmp_path, dict(one)) as again:
        assert list(again.rows) == [2]
    assert json.loads((tmp_path / digest(one) / "settings.json").read_text()) == one
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set --output-dir"):
        open_results(tmp_path / "file", {})
