"""`environments`: list, info, test, add and remove."""

import json
import sys
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core import import_utils
from prime_rl.core.errors import ConfigError
from prime_rl.entrypoints.environments import main
from prime_rl.rollouts.environment_id import check_environment, identify_environments
from tests.support.wheels import make_wheel

WORDS = '{"words": 20}'


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command in a directory with files and return what it prints."""
    (tmp_path / "my_env.py").write_text(
        '"""My first environment.\n\nMore."""\ndef load_environment(words: int = 3, *, name): ...\n'
    )
    (tmp_path / "no_env.py").write_text("raise SystemExit\n")
    (tmp_path / "broken.py").write_text("def load_environment(:\n")
    (tmp_path / "failing.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("UV_OFFLINE", "1")
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["environments", *arguments])
        main()
        return capsys.readouterr().out

    yield printed
    sys.modules.pop("my_env", None)


def test_environments_lists_packages_and_files(run, tmp_path):
    rows = {row["id"]: row for row in json.loads(run("--json"))}
    assert {"reverse_text", "gsm8k", "dataset", "my_env"} <= rows.keys()
    assert not {"no_env", "broken", "failing", "prime_rl", "verifiers"} & rows.keys()
    assert rows["my_env"]["summary"] == "My first environment."
    assert rows["my_env"]["source"] == str(tmp_path / "my_env.py")
    assert (rows["gsm8k"]["version"], len(rows["gsm8k"]["hash"])) == ("0.1.0", 12)
    assert "Grade-school mathematics" in run()


def test_environments_describes_one(run):
    described = json.loads(run("reverse_text", "--json", "--args", WORDS))
    assert described["api"] == "classic"
    assert described["arguments"]["words"] == "None"
    assert described["rewards"]["lcs_ratio"] == 1.0 == sum(described["rewards"].values())
    assert {"prompt", "answer"} <= {*described["columns"]}
    assert "lcs_ratio" in run("info", "reverse_text", "--args", WORDS)
    described = json.loads(run("my_env", "--json"))
    assert described["arguments"] == {"words": "3", "name": ""}, "also of one that does not load"
    described = json.loads(run("task_folder", "--json"))
    assert described["harnesses"]["codex"].startswith("npm install"), "of a v1 taskset"


def test_environments_tests_one_with_a_scripted_model(run, capsys):
    rows = json.loads(run("test", "reverse_text", "-n", "2", "--json", "--args", WORDS))
    assert [(row["reward"], row["error"], row["messages"][-1][0]) for row in rows] == [(1.0, None, "assistant")] * 2
    assert rows[0]["messages"] != rows[1]["messages"]
    assert "reward 0 (" in run("test", "reverse_text", "-n", "1", "--reply", "?", "--args", WORDS)


def test_environments_adds_lists_and_removes_a_package(run, tmp_path):
    wheel, verifiers = make_wheel(tmp_path), make_wheel(tmp_path, "0.1.10", "verifiers")
    assert "added tiny (classic, " in run("add", wheel.name, "--as", "tiny", "--with", verifiers.name)
    (row,) = [row for row in json.loads(run("--json")) if row["id"] == "tiny"]
    assert (row["api"], row["source"]) == ("classic", str(wheel)) and row["size"].endswith("MB")
    (env,) = identify_environments([EnvConfig(id="tiny", args={"a": 1})], "env", pytest.fail, pytest.fail)
    assert (env.id, env.label, env.package) == ("tiny_environment", "tiny", str(wheel))
    interpreter = Path(env.interpreter or "")
    assert interpreter.exists()
    check_environment(EnvConfig(id="tiny"), "env.id")
    assert run("remove", "tiny") == "removed tiny\n"
    assert not interpreter.exists()
    with pytest.raises(ConfigError, match="tiny is not installed"):
        check_environment(EnvConfig(id="tiny"), "env.id")


def test_packages_unlike_the_lock_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(import_utils.sysconfig, "get_path", lambda name: str(tmp_path))
    assert import_utils.packages_unlike_the_lock() is None
    (tmp_path / "Verifiers-0.1.10.dist-info").mkdir()
    (tmp_path / "no_such_package_of_ours-1.0.dist-info").mkdir()
    text = import_utils.packages_unlike_the_lock() or ""
    assert ": verifiers 0.1.10 (0.3.2.dev22); repair it with `uv sync --extra gpu`" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["add", "my_env.py"], "is a file: name it in env.id"),
        (["add", "none-such-of-ours"], "its packages cannot be resolved"),
        (["add", "tiny_environment-1.0-py3-none-any.whl", "--as", "my_env"], "my_env is already "),
        (["add", "tiny_environment-1.0-py3-none-any.whl", "--module", "other"], "it has tiny_environment"),
        pytest.param(
            ["add", "tiny_environment-1.0-py3-none-any.whl"],
            "does not ask for verifiers; add --with",
            marks=pytest.mark.extended,
        ),
        (["add", " "], "SOURCE is empty"),
        (["add", "tiny_environment-1.0-py3-none-any.whl", "--as", "../x"], "--as '../x': use letters"),
        (["test", "my_env", "-n", "0"], "-n 0: use at least 1"),
        (["remove", "tiny"], "tiny was not added; added are none"),
        (["test", "reverse_text", "--args", "3"], "'3' is not a JSON object"),
        (["failing"], "ZeroDivisionError"),
    ],
)
def test_environments_with_a_mistake_exits_with_2(run, words, problem, tmp_path, capsys):
    make_wheel(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2 and problem in capsys.readouterr().err
    assert not (tmp_path / "XDG_DATA_HOME").exists()
    assert [*tmp_path.glob("XDG_CACHE_HOME/prime-rl/environments/*/")] == []
