"""Every spelling of an environment's id, for `rl`, the workers and evaluations alike."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_id import find_environment, identify, identify_environments


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with files of a user."""
    (tmp_path / "path").mkdir()
    (tmp_path / "own_package").mkdir()
    for name in ("my_env", "path/other_env", "path/json", "own_package/__init__", "path/my-env", "reverse_text"):
        (tmp_path / f"{name}.py").write_text("LOADED = True\n")
    (tmp_path / "no_package").mkdir()
    (tmp_path / "own_package/x").mkdir()
    (tmp_path / "own_package/x/x.py").write_text("LOADED = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    "env_id",
    ["reverse_text", "reverse-text", "Reverse_Text", "someone/reverse_text@0.1.0", "a/reverse_text@0.1",
     "x/reverse-text@latest"],
)  # fmt: skip
def test_id_of_an_installed_environment_is_its_module(env_id):
    found = find_environment(env_id)
    assert (found.module, found.directory) == ("reverse_text", None)
    assert find_environment("harleycooper/nanochatAquaRat").module == "nanochatAquaRat", "a package with capitals"


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("env_id", ["someone/no-such-env@1.0", "", "a b", "@1.0", "no_package"])
def test_id_of_nothing_installed_names_the_commands(env_id, folder):
    with pytest.raises(ConfigError) as caught:
        find_environment(env_id, "orchestrator.env.0.id")
    assert str(caught.value).startswith(f"orchestrator.env.0.id = {env_id} is not installed; run `prime env")
    assert f"`prime env install {env_id}`" in str(caught.value)


@pytest.mark.parametrize(
    "env_id, hint",
    [
        ("revers_text", "did you mean reverse_text? Otherwise run `prime env install"),
        ("my_evn", "did you mean my_env? Otherwise run `prime env install"),
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
        ("own_package/", "own_package/__init__.py"),
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
        ("owner/", r"e = owner/: there is no such file \(looked in .*\)"),
        ("path/missing.py", r"e = path/missing\.py: there is no such file \(looked in .*\)"),
        ("path/my-env.py", r"e = path/my-env\.py: 'my-env' cannot be imported; rename the file to letters"),
        ("reverse_text", r"e = reverse_text is both .*/reverse_text\.py and the installed .*; rename the first"),
        ("path/other_env", r"e = path/other_env is not installed; for your file, write path/other_env\.py"),
        ("own_package/x", r"e = own_package/x is not installed; for your directory, write own_package/x/"),
        ("./no_package", r"e = \./no_package: there is no such file"),
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
    for env_id in ("path/my_env.py", "path/my_env/", "./my_env", "path/my_env/__init__.py"):
        assert EnvConfig(id=env_id).label == "my_env"
    assert EnvConfig(id="owner/my_env").label == "owner/my_env"


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
    before = set(sys.modules)
    try:
        loaded = [find_environment(f"{name}/gsm8k.py").load() for name in ("first", "second", "first")]
        assert [module.WHERE for module in loaded] == ["first", "second", "first"]
        assert [module.part.WHERE for module in loaded] == ["first", "second", "first"]
        assert loaded[0] is loaded[2] and all(sys.modules[module.__name__] is module for module in loaded)
        assert find_environment("path/json.py").load().REAL == "1"
        assert find_environment("gsm8k").directory is None
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_package_with_the_name_of_an_installed_one_imports_its_own_modules(folder):
    package = folder / "mine/reverse_text"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import part\nfrom .part import WHERE\n")
    (package / "part.py").write_text("WHERE = 'mine'\n")
    module = find_environment("mine/reverse_text/").load()
    assert module.WHERE == "mine" and module.__name__ != "reverse_text"
    assert Path(module.part.__file__) == package / "part.py"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on the path, with an environment two levels inside."""
    inner = tmp_path / "package_of_a_test/envs"
    inner.mkdir(parents=True)
    for name in ("package_of_a_test/__init__", "package_of_a_test/envs/__init__", "package_of_a_test/grading"):
        (tmp_path / f"{name}.py").touch()
    (inner / "gym.py").write_text("def load_environment():\n    return 'loaded'\n")
    (inner / "broken").mkdir()
    (inner / "broken/__init__.py").write_text("raise KeyError('no license')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("package_of_a_test")]:
        del sys.modules[name]


def test_id_with_dots_is_a_module_of_a_package(package, folder):
    for env_id in ("package_of_a_test.envs.gym", "package-of-a-test.envs.gym", "owner/package_of_a_test.envs.gym"):
        found = find_environment(env_id)
        assert found.origin == package / "package_of_a_test/envs/gym.py"
        assert found.load().load_environment() == "loaded"
    assert EnvConfig(id="package_of_a_test.envs.gym").label == "package_of_a_test.envs.gym"


def test_identity_of_a_module_in_a_package_includes_the_whole_package(package):
    before = identify(find_environment("package_of_a_test.envs.gym"))
    assert before.module == "package_of_a_test.envs.gym" and before.version is None
    (package / "package_of_a_test/grading.py").write_text("STRICT = True\n")
    assert identify(find_environment("package_of_a_test.envs.gym")).content_hash != before.content_hash
    assert identify(find_environment("_pytest.fixtures")).version == pytest.__version__


@pytest.mark.parametrize(
    "env_id",
    ["package_of_a_test.envs.missing", "package_of_a_test.missing.gym", "missing.my_env", "json.tool.x", "a..b"],
)
def test_id_of_a_missing_module_names_no_command_that_cannot_work(env_id, package, folder):
    with pytest.raises(ConfigError) as caught:
        find_environment(env_id, "orchestrator.env.0.id")
    assert str(caught.value) == (
        f"orchestrator.env.0.id = {env_id} is not installed; no module {env_id} can be imported; install the package "
        "that has it, or correct the name"
    )


def test_id_in_a_package_that_cannot_be_imported_is_refused_with_the_reason(package):
    with pytest.raises(ConfigError, match=r"e = package_of_a_test\.envs\.broken\.gym cannot be imported: .*no license"):
        find_environment("package_of_a_test.envs.broken.gym", "e")


@pytest.mark.extended(after=2)
@pytest.mark.parametrize("given", ["good", "package_of_a_test.envs.missing", "no_such_env", "path/missing.py"])
@pytest.mark.parametrize("command", ["rl", "orchestrator", "eval"])
def test_dry_run_refuses_the_ids_that_a_run_refuses(command, given, package, folder, monkeypatch, capsys):
    env_id = "package_of_a_test.envs.gym" if given == "good" else given
    key = "--orchestrator.env.id" if command == "rl" else "--env.id"
    monkeypatch.setattr(sys, "argv", [command, key, env_id, "--dry-run"])
    main = importlib.import_module(f"prime_rl.entrypoints.{command}").main
    with pytest.raises(SystemExit) as caught:
        main()
    output = capsys.readouterr()
    if given == "good":
        assert caught.value.code == 0 and env_id in output.out
        return
    assert caught.value.code == 2 and not output.out
    prefix = "orchestrator." if command == "rl" else ""
    with pytest.raises(ConfigError) as refused:
        identify_environments([EnvConfig(id=env_id)], f"{prefix}env", print, print)
    assert str(refused.value) in output.err


@pytest.mark.slow
def test_id_of_a_missing_file_ends_rl_with_one_line(folder):
    argv = [sys.executable, "-m", "prime_rl.entrypoints.rl", "--orchestrator.env.id", "path/missing.py"]
    run = subprocess.run([*argv, "--model.name", str(folder)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
