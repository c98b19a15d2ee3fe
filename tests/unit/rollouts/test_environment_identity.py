"""Version, content and origin of an environment; installation from the hub by a stand-in for `prime`."""

import shutil
import sys
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.environment_id import (
    find_environment,
    identify,
    identify_all,
    identify_environments,
)

ROOT = Path(__file__).parents[3]
PRIME = """#!{python}
import pathlib, sys
assert sys.argv[1:3] == ["env", "install"], sys.argv
if "broken" in sys.argv[3]:
    sys.exit("no such environment\\nin the hub")
site = pathlib.Path({site!r})
(site / "hub_env.py").write_text("")
info = site / "hub_env-1.2.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\\nName: hub-env\\nVersion: 1.2\\n")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prime(folder, monkeypatch):
    """A command `prime` that installs hub_env 1.2."""
    site = folder / "site"
    site.mkdir()
    command = folder / "bin/prime"
    command.parent.mkdir()
    command.write_text(PRIME.format(python=sys.executable, site=str(site)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    monkeypatch.syspath_prepend(str(site))


def warnings_of(*environments: EnvConfig) -> tuple[list[EnvConfig], list[str]]:
    warnings: list[str] = []
    return identify_environments(environments, "env", warnings.append, print), warnings


def test_identity_of_a_package_has_its_version_hash_and_path():
    identity = identify(find_environment("reverse_text"))
    assert (identity.version, identity.is_local) == ("0.1.0", True)
    assert Path(identity.source) == ROOT / "environments/reverse_text"
    assert str(identity) == f"reverse_text 0.1.0 {identity.content_hash}" and len(identity.content_hash) == 12


@pytest.mark.extended
def test_identity_of_an_editable_package_with_other_modules_has_its_version():
    assert identify(find_environment("nanochatAquaRat")).version == "0.1.0"
    with pytest.raises(ConfigError, match=r"version 0\.1\.0 is installed"):
        find_environment("harleycooper/nanochatAquaRat@9.9")


def test_identity_changes_with_content_names_and_linked_files_only(folder):
    package, linked = folder / "my_env", folder / "linked"
    for directory in (package, package / "__pycache__", linked):
        directory.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    (linked / "tool.py").write_text("b = 1\n")
    (package / "tools").symlink_to(linked)
    (package / "loop").symlink_to(package)

    def current() -> str:
        return identify(find_environment("my_env")).content_hash

    first = current()
    (package / "__pycache__/x.pyc").write_text("compiled")
    (package / ".hidden").write_text("editor")
    assert current() == first
    (linked / "tool.py").write_text("b = 2\n")
    second = current()
    (package / "data.txt").write_text("")
    assert len({first, second, current()}) == 3
    shutil.copytree(package / "tools", folder / "copy")
    (package / "data.txt").unlink()
    (linked / "tool.py").write_text("b = 1\n")
    assert current() == first


def test_identity_of_a_file_has_no_version(folder):
    (folder / "my_env.py").write_text("")
    (config,), warnings = warnings_of(EnvConfig(id="my_env.py"))
    assert config.identity is not None and config.identity.startswith("my_env (file) ")
    assert not warnings


@pytest.mark.parametrize(
    "import_path", ["rewards_of_mine:score", "rewards_of_mine.py:score", "own_package.rewards:score"]
)
def test_identity_changes_with_the_files_of_added_rewards(import_path, folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("rewards_of_mine.py", "own_package/__init__.py", "own_package/rewards.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("def score(text): return 0.0\n")
    config = EnvConfig(id="reverse_text", rewards=[{"import_path": import_path}])
    ((before,), _), ((same,), _) = warnings_of(config), warnings_of(config)
    for name in ("rewards_of_mine.py", "own_package/rewards.py"):
        (folder / name).write_text("def score(text): return 1.0\n")
    (after,), warnings = warnings_of(before)
    assert before.identity == same.identity != after.identity
    assert warnings == [f"env.0: environment 'reverse_text' was {before.identity} and is now {after.identity}"]


def test_local_package_that_stands_in_for_the_hub_warns_once():
    (config,), warnings = warnings_of(EnvConfig(id="primeintellect/reverse-text@0.1.0"))
    assert warnings == [
        "env.0.id = primeintellect/reverse-text@0.1.0: the local package in "
        f"{ROOT / 'environments/reverse_text'} is used, not the one of the hub"
    ]
    assert warnings_of(config) == ([config], [])
    assert warnings_of(EnvConfig(id="reverse_text"))[1] == []


def test_every_environment_of_a_run_gets_its_identity():
    env, evaluation = [{"id": "reverse_text"}], {"env": [{"id": "gsm8k"}]}
    config = OrchestratorConfig.model_validate(
        {"env": env, "eval": evaluation, "batch_size": 2, "rollouts_per_example": 2}
    )
    identified = identify_all(config, "", print, print)
    assert identified.identities["reverse_text"].startswith("reverse_text 0.1.0 ")
    assert identified.eval.env[0].identity.startswith("gsm8k 0.1.0 ")
    missing = [EnvConfig(id="none-such")]
    for changes, key in (
        ({"env": missing}, "env"),
        ({"eval": config.eval.model_copy(update={"env": missing})}, "eval.env"),
    ):
        with pytest.raises(ConfigError, match=rf"^orchestrator\.{key}\.0\.id = none-such is not installed"):
            identify_all(config.model_copy(update=changes), "orchestrator.", print, print)


def test_install_installs_a_missing_environment(prime):
    (config,), _ = warnings_of(EnvConfig(id="owner/hub-env@1.2", install=True))
    assert config.identity is not None and config.identity.startswith("hub_env 1.2 ")
    with pytest.raises(ConfigError, match=r"version 1\.2 is installed"):
        warnings_of(EnvConfig(id="owner/hub-env@3.0", install=True))


@pytest.mark.parametrize(
    "env_id, message",
    [
        ("owner/broken-env", r"`prime env install owner/broken-env` failed with 1: no such environment in the hub"),
        ("my_env", r"env\.0\.install needs an environment of the hub \(owner/name\), not my_env"),
        ("a/my_env.py", r"env\.0\.install needs an environment of the hub"),
    ],
)
def test_install_that_fails_is_one_line(env_id, message, prime):
    with pytest.raises(ConfigError, match=message) as caught:
        warnings_of(EnvConfig(id=env_id, install=True))
    assert "\n" not in str(caught.value)


def test_install_without_the_command_names_it(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError, match="needs the command `prime`; run `uv tool install prime`"):
        warnings_of(EnvConfig(id="owner/hub-env", install=True))
