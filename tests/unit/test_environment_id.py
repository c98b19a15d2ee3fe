"""Every spelling of an environment's id, for `rl`, the workers and evaluations alike."""

import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environments.environment_id import find_environment


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with files of a user."""
    (tmp_path / "path").mkdir()
    (tmp_path / "own_package").mkdir()
    for name in ("my_env", "path/other_env", "path/json", "own_package/__init__", "path/my-env", "reverse_text"):
        (tmp_path / f"{name}.py").write_text("LOADED = True\n")
    (tmp_path / "no_package").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    "env_id",
    [
        "reverse_text",
        "reverse-text",
        "Reverse_Text",
        "someone/reverse_text@0.1.0",
        "a/reverse_text@0.1",
        "x/reverse-text@latest",
    ],
)
def test_id_of_an_installed_environment_is_its_module(env_id):
    found = find_environment(env_id)
    assert (found.module, found.directory) == ("reverse_text", None)


def test_id_keeps_the_case_of_a_package_that_has_capitals():
    assert find_environment("harleycooper/nanochatAquaRat").module == "nanochatAquaRat"


@pytest.mark.parametrize("env_id", ["someone/no-such-env@1.0", "", "a b", "owner/", "@1.0", "no_package"])
def test_id_of_nothing_installed_names_the_commands(env_id, folder):
    with pytest.raises(ConfigError) as caught:
        find_environment(env_id, "orchestrator.env.0.id")
    assert str(caught.value).startswith(f"orchestrator.env.0.id = {env_id} is not installed; run `uv pip install -e")
    assert f"`prime env install {env_id}`" in str(caught.value)


@pytest.mark.parametrize(
    "env_id, hint",
    [
        ("revers_text", "did you mean reverse_text? Otherwise run `uv pip install"),
        ("my_evn", "did you mean my_env? Otherwise run `uv pip install"),
        ("my_env.py:load_environment", "for your file, write my_env.py; its function is load_environment()"),
    ],
)
def test_id_that_is_misspelt_names_the_environment(env_id, hint, folder):
    with pytest.raises(ConfigError) as caught:
        find_environment(env_id)
    assert hint in str(caught.value)


def test_id_of_another_version_is_refused():
    with pytest.raises(ConfigError, match=r"version 0\.1\.0 is installed; run .*, or remove @9\.9"):
        find_environment("someone/reverse_text@9.9")
    with pytest.raises(ConfigError, match=r"version 0\.1\.0 is installed"):
        find_environment("someone/reverse_text@main")


@pytest.mark.parametrize(
    "env_id, file",
    [
        ("my_env", "my_env.py"),
        ("My-Env", "my_env.py"),
        ("./my_env.py", "my_env.py"),
        ("own_package", "own_package/__init__.py"),
        ("path/other_env.py", "path/other_env.py"),
    ],
)
def test_id_of_a_file_is_its_module_and_can_be_imported(env_id, file, folder, monkeypatch):
    found = find_environment(env_id)
    assert found.origin == folder / file
    monkeypatch.delitem(sys.modules, found.module, raising=False)
    assert found.load().LOADED
    assert Path(sys.modules.pop(found.module).__file__) == folder / file


@pytest.mark.parametrize(
    "env_id, message",
    [
        ("path/missing.py", r"e = path/missing\.py: there is no such file \(looked in .*\)"),
        ("path/json.py", r"e = path/json\.py: .*json/__init__\.py is also called json; rename your file"),
        ("path/my-env.py", r"e = path/my-env\.py: 'my-env' cannot be imported; rename the file to letters"),
        ("reverse_text", r"e = reverse_text is both .*/reverse_text\.py and the installed .*; rename the first"),
        ("path/other_env", r"e = path/other_env is not installed; for your file, write path/other_env\.py"),
    ],
)
def test_id_of_a_file_that_cannot_be_used_is_one_line(env_id, message, folder):
    with pytest.raises(ConfigError, match=message) as caught:
        find_environment(env_id, "e")
    assert "\n" not in str(caught.value)


def test_id_with_an_owner_never_means_a_file(folder):
    with pytest.raises(ConfigError, match="owner/my_env is not installed"):
        find_environment("owner/my_env")
    assert find_environment("owner/reverse_text").directory is None


def test_label_of_a_file_is_its_name():
    assert EnvConfig(id="path/my_env.py").label == "my_env"


@pytest.mark.slow
def test_id_of_a_missing_file_ends_rl_with_one_line(folder):
    argv = [sys.executable, "-m", "prime_rl.entrypoints.rl", "--orchestrator.env.id", "path/missing.py"]
    run = subprocess.run([*argv, "--model.name", str(folder)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
