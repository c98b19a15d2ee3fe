"""Every spelling of an environment's id, for `rl`, the workers and evaluations alike."""

import importlib
import itertools
import sys
from functools import cache
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts import environment_id
from prime_rl.rollouts.environment_id import find_environment, identify, identify_environments


@pytest.fixture(scope="module", autouse=True)
def _installed_environments_are_found_once():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("installed_environments", "packages_distributions"):
            patch.setattr(environment_id, name, cache(getattr(environment_id, name)))
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with files of a user."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path/broken.py").write_text("raise KeyError('no license')\n")
    names = ("my_env", "path/other_env", "path/json", "own_package/__init__", "path/my-env", "reverse_text")
    for path in ("no_package", "own_package/x"):
        (tmp_path / path).mkdir(parents=True)
    for name in (*names, "own_package/x/x"):
        (tmp_path / f"{name}.py").write_text("LOADED = True\n")
    (tmp_path / "rows.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_directory_that_was_removed_from_the_path_stays_away(folder):
    before = set(sys.modules)
    find_environment("path/other_env.py").load()
    sys.path.remove(str(folder / "path"))
    find_environment("./my_env.py").load()
    assert str(folder) in sys.path and str(folder / "path") not in sys.path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "env_id",
    ["reverse_text", "reverse-text", "Reverse_Text", "someone/reverse_text@0.1.0", "a/reverse_text@0.1",
     "x/reverse-text@latest"],
)  # fmt: skip
def test_id_of_an_installed_environment_is_its_module(env_id):
    found = find_environment(env_id)
    assert (found.module, found.directory) == ("reverse_text", None)
    assert find_environment("harleycooper/nanochatAquaRat").module == "nanochatAquaRat", "a package with capitals"


@pytest.mark.parametrize(
    "env_id, file",
    [
        ("my_env", "my_env.py"),
        ("My-Env", "my_env.py"),
        ("./my_env.py", "my_env.py"),
        ("own_package", "own_package/__init__.py"),
        ("path/other_env.py", "path/other_env.py"),
        ("./own_package", "own_package/__init__.py"),
        ("own_package/__init__.py", "own_package/__init__.py"),
        ("own_package/x/", "own_package/x/x.py"),
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
        # installed environments
        ("someone/no-such-env@1.0", "is not installed; run `prime env"),
        ("", "is not installed; run `prime env"),
        ("no_package", "is not installed; run `prime env"),
        ("owner/my_env", "owner/my_env is not installed"),  # an owner never means a file
        ("revers_text", "did you mean reverse_text? Otherwise run `prime env install"),
        ("someone/reverse_text@9.9", "version 0.1.0 is installed; run "),
        ("someone/reverse_text@main", "version 0.1.0 is installed"),
        # files
        ("my_evn", "did you mean my_env? Otherwise run `prime env install"),
        ("my_env.py:load_environment", "for your file, write my_env.py; its function is load_environment()"),
        ("owner/", "e = owner/: there is no such file (looked in "),
        ("path/missing.py", "e = path/missing.py: there is no such file (looked in "),
        ("./rows.csv", "e = ./rows.csv is not a Python file; write the path of a .py file"),
        ("path/my-env.py", "e = path/my-env.py: 'my-env' cannot be imported; rename the file to letters"),
        ("reverse_text", "reverse_text.py and the installed "),
        ("path/other_env", "e = path/other_env is not installed; for your file, write path/other_env.py"),
        ("own_package/x", "e = own_package/x is not installed; for your directory, write own_package/x/"),
        # modules of packages
        ("package_of_a_test.envs.missing", "no module package_of_a_test.envs.missing can be imported; install the"),
        ("missing.my_env", "no module missing.my_env can be imported; install the package that has it, or correct"),
        ("a..b", "no module a..b can be imported; install the package that has it, or correct the name"),
        ("package_of_a_test.envs.broken.gym", "e = package_of_a_test.envs.broken.gym cannot be imported: "),
    ],
)
def test_id_that_cannot_be_used_is_refused_in_one_line(env_id, message, folder, package):
    with pytest.raises(ConfigError) as caught:
        find_environment(env_id, "e")
    assert message in str(caught.value) and str(caught.value).startswith(f"e = {env_id}")
    assert "\n" not in str(caught.value)


def test_file_with_the_name_of_another_module_is_loaded_under_another_name(folder):
    """An installed package, one of the standard library, and a file of another directory."""
    for name in ("first", "second"):
        (folder / name / "neighbour_package").mkdir(parents=True)
        (folder / name / "gsm8k.py").write_text(
            "from env_neighbour import WHERE\nimport neighbour_package.part as part\n"
        )
        (folder / name / "env_neighbour.py").write_text(f"WHERE = {name!r}\n")
        (folder / name / "neighbour_package/__init__.py").touch()
        (folder / name / "neighbour_package/part.py").write_text(f"WHERE = {name!r}\n")
    (folder / "path/json.py").write_text("import json\nREAL = json.dumps(1)\n")
    (folder / "mine/reverse_text").mkdir(parents=True)
    (folder / "mine/reverse_text/__init__.py").write_text("from . import part\nfrom .part import WHERE\n")
    (folder / "mine/reverse_text/part.py").write_text("WHERE = 'mine'\n")
    before = set(sys.modules)
    try:
        loaded = [find_environment(f"{name}/gsm8k.py").load() for name in ("first", "second", "first")]
        assert [module.WHERE for module in loaded] == ["first", "second", "first"]
        assert [module.part.WHERE for module in loaded] == ["first", "second", "first"]
        assert loaded[0] is loaded[2] and all(sys.modules[module.__name__] is module for module in loaded)
        assert find_environment("path/json.py").load().REAL == "1"
        assert find_environment("gsm8k").directory is None
        package = find_environment("mine/reverse_text/").load()
        assert package.WHERE == "mine" and package.__name__ != "reverse_text"
        assert Path(package.part.__file__) == folder / "mine/reverse_text/part.py"
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on the path, with an environment two levels inside."""
    root = tmp_path / "site"
    inner = root / "package_of_a_test/envs"
    (inner / "broken").mkdir(parents=True)
    for name in ("package_of_a_test/__init__", "package_of_a_test/envs/__init__", "package_of_a_test/grading"):
        (root / f"{name}.py").touch()
    (inner / "gym.py").write_text("def load_environment():\n    return 'loaded'\n")
    (inner / "broken/__init__.py").write_text("raise KeyError('no license')\n")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("PYTHONPATH", str(root))
    yield root
    for name in [name for name in sys.modules if name.startswith("package_of_a_test")]:
        del sys.modules[name]


def test_id_with_dots_is_a_module_of_a_package(package, folder):
    for env_id in ("package_of_a_test.envs.gym", "package-of-a-test.envs.gym", "owner/package_of_a_test.envs.gym"):
        found = find_environment(env_id)
        assert found.origin == package / "package_of_a_test/envs/gym.py"
        assert found.load().load_environment() == "loaded"


@pytest.mark.parametrize(
    "env_id, label",
    [
        ("path/my_env.py", "my_env"), ("path/my_env/", "my_env"), ("./my_env", "my_env"),
        ("path/my_env/__init__.py", "my_env"), ("owner/my_env", "owner/my_env"), ("package.envs", "package.envs"),
    ],
)  # fmt: skip
def test_label_of_a_file_is_its_name(env_id, label):
    assert EnvConfig(id=env_id).label == label


def test_identity_of_a_module_in_a_package_includes_the_whole_package(package):
    before = identify(find_environment("package_of_a_test.envs.gym"))
    assert before.module == "package_of_a_test.envs.gym" and before.version is None
    (package / "package_of_a_test/grading.py").write_text("STRICT = True\n")
    assert identify(find_environment("package_of_a_test.envs.gym")).content_hash != before.content_hash
    assert identify(find_environment("_pytest.fixtures")).version == pytest.__version__


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("command, given", [
    ("rl", "json"),
    *itertools.product(["rl", "orchestrator", "eval"],
                       ["no_such_env", "good", "package_of_a_test.envs.missing", "path/missing.py", "path/broken.py"]),
    ("rl", "os.path"), ("rl", "my_env"),
])  # fmt: skip
def test_dry_run_refuses_the_ids_that_a_run_refuses(command, given, package, folder, monkeypatch, capsys):
    env_id = "package_of_a_test.envs.gym" if given == "good" else given
    key = "--orchestrator.env.id" if command == "rl" else "--env.id"
    monkeypatch.setattr(sys, "argv", [command, key, env_id, "--dry-run"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"prime_rl.entrypoints.{command}").main()
    output = capsys.readouterr()
    if given == "good":
        assert caught.value.code == 0 and env_id in output.out
        return
    assert caught.value.code == 2 and not output.out
    if given in ("json", "os.path", "my_env", "path/broken.py"):  # found, but no environment
        problem = "cannot be imported: KeyError" if "broken" in given else "defines no load_environment()"
        assert output.err.count("\n") == 1 and given in output.err and problem in output.err
        return
    prefix = "orchestrator." if command == "rl" else ""
    with pytest.raises(ConfigError) as refused:
        identify_environments([EnvConfig(id=env_id)], f"{prefix}env", print, print)
    assert str(refused.value) in output.err


def test_id_of_a_missing_file_ends_rl_with_one_line(folder, monkeypatch, capsys):
    argv = ["rl", "--orchestrator.env.id", "path/missing.py", "--model.name", str(folder)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("prime_rl.entrypoints.rl").main()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
