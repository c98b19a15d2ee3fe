"""Functions that other processes cannot import are written to files."""

import json
import subprocess
import sys
import threading

import pytest

from prime_rl.api.shipped_code import name_function, write_code
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import load_function

PROGRAM = """
import json, sys
from pathlib import Path
import helper
from prime_rl.api.shipped_code import name_function
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


def test_name_function_of_an_installed_package_is_its_import_path(tmp_path):
    assert name_function(json.dumps, tmp_path) == "json:dumps"
    assert not list(tmp_path.iterdir())


def test_write_code_shows_the_source(tmp_path):
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
