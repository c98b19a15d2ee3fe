"""The arguments of `Run` become keys of `rl`, with its errors; functions that others cannot import become files."""

import json
import subprocess
import sys
import threading

import pytest

import prime_rl
from prime_rl.api.run_arguments import name_function, write_code
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import load_function


def named_advantage(groups):
    return [list(group.rewards) for group in groups]


def test_run_arguments_override_config_over_file(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text("max_steps = 5\n[orchestrator]\nbatch_size = 16\n")
    assert prime_rl.Run(config=file, output_dir=tmp_path).config.max_steps == 5
    config = prime_rl.Run("some/model", config=file, output_dir=tmp_path, max_steps=7).config
    assert (config.max_steps, config.orchestrator.batch_size, config.trainer.max_steps) == (7, 16, 7)
    assert config.trainer.model.name == "some/model"
    for values in ({"orchestrator.batch_size": 32}, {"orchestrator": {"batch_size": 32}}):
        config = prime_rl.Run(config=values, output_dir=tmp_path, resume=-1, ckpt={"interval": 2}).config
        assert config.orchestrator.batch_size == 32
        assert (config.trainer.ckpt.resume_step, config.orchestrator.ckpt.interval) == (-1, 2)


def test_run_starts_a_server_unless_there_is_another(tmp_path):
    assert prime_rl.Run(output_dir=tmp_path).config.inference is not None
    own = prime_rl.Run(output_dir=tmp_path, config={"inference": None}).config
    other = prime_rl.Run(output_dir=tmp_path, config={"orchestrator.client.base_url": "http://localhost:1"}).config
    assert own.inference is None and other.inference is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"config": {"orchestrator.batch_sise": 8}},
            r"unknown key orchestrator.batch_sise .*did you mean .*batch_size",
        ),
        ({"max_steps": "many"}, "max_steps .*given in Python"),
        ({"config": {"orchestrator.batch_size": 12, "orchestrator.rollouts_per_example": 8}}, "not a multiple"),
        ({"config": "missing.toml"}, "missing.toml does not exist"),
        ({"reward": named_advantage}, "set env too"),
        ({"agent": named_advantage}, "set env too"),
    ],
)
def test_run_bad_input_is_a_config_error_of_one_line(values, message, tmp_path):
    with pytest.raises(prime_rl.ConfigError, match=message) as caught:
        prime_rl.Run(output_dir=tmp_path, **values)
    assert "\n" not in str(caught.value)


def test_run_functions_become_import_paths(tmp_path):
    functions = {"advantage": named_advantage, "loss": lambda inputs: 7, "reward": named_advantage}
    config = prime_rl.Run(env="reverse_text", output_dir=tmp_path, **functions).config
    path = f"{__name__}:named_advantage"
    assert config.orchestrator.advantage.import_path == path
    assert config.orchestrator.env[0].rewards[0].import_path == path
    assert load_function(config.trainer.loss.import_path, "key")(None) == 7


async def test_run_agent_is_that_of_each_environment_without_one(tmp_path):
    async def solve(prompt):
        return len(prompt)

    environments = ["my_taskset", {"id": "other_taskset", "agent": "other:solve"}]
    one, other = prime_rl.Run(env=environments, agent=solve, output_dir=tmp_path).config.orchestrator.env
    assert await load_function(one.agent, "key")("abc") == 3
    assert other.agent == "other:solve"


def test_run_environment_function_becomes_a_file(tmp_path):
    def load_environment(limit=3):
        return limit

    config = prime_rl.Run(env={"id": load_environment, "args": {"limit": 4}, "weight": 2}, output_dir=tmp_path).config
    env = config.orchestrator.env[0]
    assert env.id.startswith(str(tmp_path / "code/load_environment_"))
    assert (env.args, env.weight) == ({"limit": 4}, 2)
    assert load_function(f"{env.id}:load_environment", "key")(**env.args) == 4


def test_run_loaded_environments_keep_their_changes_and_get_different_names(tmp_path):
    environment = prime_rl.load_environment("reverse_text", words=4)
    environment.rubric.add_reward_func(len, weight=0.5)
    config = prime_rl.Run(env=[environment, environment, "gsm8k", "code_tests"], output_dir=tmp_path).config
    assert [env.label for env in config.orchestrator.env] == ["reverse_text", "reverse_text_2", "gsm8k", "code_tests"]
    loaded = load_function(f"{config.orchestrator.env[1].id}:load_environment", "key")()
    assert loaded.rubric.rubrics[0].weights[-1] == 0.5 and len(loaded.get_dataset()) == 4


PROGRAM = """
import json, sys
from pathlib import Path
import helper
from prime_rl.api.run_arguments import name_function
FACTOR = 3
def scaled(value):
    return FACTOR * helper.add_one(value)
print(json.dumps([name_function(f, Path(sys.argv[1])) for f in (scaled, helper.add_one, lambda value: value * FACTOR)]))
"""
READER = """
import json, sys
from prime_rl.core.import_utils import load_function
print(json.dumps([load_function(path, "key")(1) for path in json.loads(sys.argv[1])]))
"""


def run(cwd, *arguments):
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_name_function_of_a_script_loads_in_another_process(tmp_path):
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    scripts.mkdir()
    elsewhere.mkdir()
    (scripts / "program.py").write_text(PROGRAM)
    (scripts / "helper.py").write_text("def add_one(value):\n    return value + 1\n")
    paths = json.loads(run(elsewhere, str(scripts / "program.py"), str(tmp_path / "code")))
    assert all(path.startswith(str(tmp_path / "code")) for path in paths)
    assert json.loads(run(tmp_path, "-c", READER, json.dumps(paths))) == [6, 2, 3]


def test_write_code_shows_the_source(tmp_path):
    assert name_function(json.dumps, tmp_path) == "json:dumps", "of an installed package"
    assert not list(tmp_path.iterdir())

    def double(value):
        """Return "twice" the value."""
        return value * 2

    file = write_code("double", double, tmp_path)
    assert "return value * 2" in file.read_text()
    assert load_function(f"{file}:double", "key")(4) == 8
    assert write_code("double", double, tmp_path) == file


def test_write_code_object_that_cannot_be_pickled_is_refused_in_one_line(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot pickle.*pass a function that makes it") as caught:
        write_code("load_environment", lambda: lock, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("secret", ["hf_0123456789", "pässword0123"])
def test_write_code_function_with_a_secret_is_refused(tmp_path, monkeypatch, secret):
    monkeypatch.setenv("HF_TOKEN", secret)
    with pytest.raises(ConfigError, match="value of the environment variable HF_TOKEN") as caught:
        write_code("reward", lambda completion: secret in completion, tmp_path)
    assert secret not in str(caught.value)
    assert not list(tmp_path.iterdir())
