"""`environments`: what is installed, what is in the working directory, and the arguments of one."""

import json
import sys

import pytest

from prime_rl.entrypoints.environments import main


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

    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["environments", *arguments])
        main()
        return capsys.readouterr().out

    return printed


def test_environments_lists_packages_and_files(run, tmp_path):
    rows = {row["id"]: row for row in json.loads(run("--json"))}
    assert {"reverse_text", "gsm8k", "dataset", "my_env"} <= rows.keys()
    assert not {"no_env", "broken", "failing", "prime_rl", "verifiers"} & rows.keys()
    assert rows["my_env"]["summary"] == "My first environment."
    assert rows["my_env"]["source"] == str(tmp_path / "my_env.py")
    assert (rows["gsm8k"]["version"], len(rows["gsm8k"]["hash"])) == ("0.1.0", 12)
    assert "Grade-school mathematics" in run()


def test_environments_shows_the_arguments_of_one(run):
    described = json.loads(run("my_env", "--json"))
    assert described["kind"] == "classic"
    assert described["arguments"] == [{"argument": "words", "default": "3"}, {"argument": "name", "default": ""}]
    assert "my_env (file) " in run("my_env")
    sys.modules.pop("my_env", None)


@pytest.mark.parametrize("env_id, message", [("none_such", "is not installed"), ("failing", "ZeroDivisionError")])
def test_environments_without_such_an_environment_exits_with_2(run, env_id, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run(env_id)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
