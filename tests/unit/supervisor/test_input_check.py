"""What a user gives to a run is loaded in other processes before anything starts."""

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.import_utils import load_function
from prime_rl.supervisor.input_check import InputCheck, check_dry_run

MODEL = "configs/reverse_text/model"
ENVIRONMENT = """
import os
import sys
import time

import verifiers as vf
from datasets import Dataset


def load_environment(rows=3, trouble=""):
    print("loud")
    if trouble == "exit":
        sys.exit(7)
    if trouble == "crash":
        os.abort()
    if trouble == "hang":
        time.sleep(600)
    if "PRIME_RL_API_KEY" in os.environ:
        raise RuntimeError("it can read the key of the server")
    data = Dataset.from_list([{"question": "q", "answer": "a"}] * rows)
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric())
"""


FUNCTIONS = """
def loss(inputs, beta):
    return -beta * inputs.logprobs
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "loud.py").write_text(ENVIRONMENT)
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def load(*arguments):
        fixed = ["--model.name", MODEL, "--orchestrator.env.id", str(tmp_path / "loud.py")]
        return RLConfig.load([*fixed, *(argument.format(tmp_path) for argument in arguments)])

    return load


CUSTOM_LOSS = ["--trainer.loss.type", "custom", "--trainer.loss.import-path"]


def check_input(config):
    with InputCheck() as check:
        return check.run(config)


@pytest.mark.extended
@pytest.mark.slow
def test_check_input_counts_the_examples_of_all_environments(config, monkeypatch):
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", "secret")
    monkeypatch.setenv("PRIME_RL_API_KEY", "secret")
    loaded = config("--orchestrator.client.api-key-var", "PRIME_RL_API_KEY")
    (env,) = loaded.orchestrator.env
    both = [env, env.model_copy(update={"args": {"rows": 5}, "name": "other"})]
    orchestrator = loaded.orchestrator.model_copy(update={"env": both})
    assert check_input(loaded.model_copy(update={"orchestrator": orchestrator})) == 8


@pytest.mark.extended(after=2)  # a loss is loaded without the imports of environments
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([*CUSTOM_LOSS, "{}/functions.py:los"], ["trainer.loss.import_path", "no function 'los'; did you mean loss?"]),
        ([*CUSTOM_LOSS, "{}/functions.py:loss"], ["trainer.loss.import_path", "missing a required argument: 'beta'"]),
        (["--orchestrator.env.args.row", "3"], ["env.args.row", "did you mean rows?"]),
        (["--orchestrator.env.args.trouble", "exit"], ["loud.py: the process that loaded it exited with code 7"]),
        (["--orchestrator.env.args.trouble", "crash"], ["the process that loaded it was killed by signal 6"]),
    ],
)
def test_check_input_refuses_what_a_process_would_refuse(config, arguments, parts):
    with pytest.raises(ConfigError) as caught:
        check_input(config(*arguments))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


FILE = '"{}/functions.py:missing"'


@pytest.mark.extended(after=2)  # the first import verifiers
@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--orchestrator.env.rewards", f"[{FILE}]"], "env.rewards.0.import_path of environment"),
        ([*CUSTOM_LOSS, FILE.strip('"')], "trainer.loss.import_path"),
        (["--orchestrator.eval.env", f'[{{{{id="gsm8k",rewards=[{FILE}]}}}}]'], "env.rewards.0.import_path"),
        (["--orchestrator.env.agent", FILE.strip('"')], "env.agent of environment"),
        (["--orchestrator.advantage.type", "custom", "--orchestrator.advantage.import-path", FILE.strip('"')],
         "orchestrator.advantage.import_path"),
        (["--orchestrator.buffer.type", "curriculum", "--orchestrator.buffer.import-path", FILE.strip('"')],
         "orchestrator.buffer.import_path"),
    ],
)  # fmt: skip
def test_dry_run_imports_the_functions_that_a_configuration_names(config, arguments, key):
    with pytest.raises(ConfigError, match=r"functions.py has no function 'missing'") as caught:
        check_dry_run(config(*arguments))
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("import sys; sys.exit(3)", r"SystemExit: 3 \(.*own.py:1\)$"), ("def f(:", r"SyntaxError: .*\(own.py, line 1\)$")],
)
def test_file_of_a_function_that_cannot_be_imported_is_named(tmp_path, text, problem):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"^key = '.*own.py:f': cannot import .*{problem}"):
        load_function(f"{tmp_path}/own.py:f", "key")


def test_dry_run_of_an_evaluation_of_benchmarks_alone_passes():
    check_dry_run(EvalConfig.load(["--benchmarks", "gsm8k"]))


def test_check_input_of_an_environment_that_hangs_ends(config):
    arguments = ["--orchestrator.env.args.trouble", "hang", "--orchestrator.env.start-timeout-seconds", "0.5"]
    with pytest.raises(RunError, match=r"did not load within 0\.5 s"):
        check_input(config(*arguments))
