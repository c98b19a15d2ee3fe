"""`max_epochs` becomes `max_steps`."""

import io
import json

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environments import example_count
from prime_rl.supervisor import launch


def config(*arguments):
    sizes = ["--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "4"]  # 8 examples per step
    return RLConfig.load(["--orchestrator.env.id", "reverse_text", *sizes, *arguments])


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.setattr(launch, "count_examples", lambda environments: 100 * len(environments))


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--max-epochs", "1"], 12),
        (["--max-epochs", "2"], 25),
        (["--max-epochs", "0.5", "--max-steps", "100"], 6),
        (["--max-epochs", "2", "--max-steps", "7"], 7),
        (["--max-steps", "7"], 7),
        ([], None),
    ],
)
def test_epochs_limit_the_steps_of_all_processes(examples, arguments, steps):
    limited = launch.limit_to_epochs(config(*arguments))
    assert limited.max_steps == limited.trainer.max_steps == limited.orchestrator.max_steps == steps


def test_less_than_one_step_is_refused(examples):
    with pytest.raises(ConfigError, match=r"max_epochs = 0\.01 of 100 examples is less than one step of 8"):
        launch.limit_to_epochs(config("--max-epochs", "0.01"))


ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


def load_environment(rows=3):
    print("loud")
    data = Dataset.from_list([{"question": "q", "answer": "a"}] * rows)
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric())
"""


@pytest.fixture
def loud(tmp_path):
    (tmp_path / "loud.py").write_text(ENVIRONMENT)
    return config("--orchestrator.env.id", str(tmp_path / "loud.py")).orchestrator.env[0]


def test_counting_process_adds_the_examples_of_all_environments(loud, tmp_path, monkeypatch):
    environments = [loud, loud.model_copy(update={"args": {"rows": 5}})]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([env.model_dump(mode="json") for env in environments])))
    monkeypatch.setattr("sys.argv", ["example_count", str(tmp_path / "count")])
    example_count.main()
    assert (tmp_path / "count").read_text() == "8"


@pytest.mark.extended
def test_examples_are_counted_in_another_process_and_errors_are_one_line(loud):
    assert example_count.count_examples([loud]) == 3
    with pytest.raises(ConfigError, match=r"^max_epochs: cannot count the examples: .*'columns'") as caught:
        example_count.count_examples([loud.model_copy(update={"args": {"columns": 5}})])
    assert "\n" not in str(caught.value)
