"""`eval` starts prime-rl's command where verifiers' script of that name was installed last."""

import importlib.metadata
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

SCRIPT = """#!{python}
from {module} import main
main()
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """The scripts folder of a fresh environment with the packages of this one."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(root)})
    Path(packages, "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return root / "bin"


def run(script: Path, module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script.write_text(SCRIPT.format(python=script.parent / "python", module=module))
    script.chmod(0o755)
    return subprocess.run([script, *arguments], capture_output=True, text=True, cwd=cwd, timeout=60)


def test_eval_script_of_verifiers_runs_our_command(scripts, tmp_path):
    (tmp_path / "loguru.py").write_text("raise SystemExit('imported from the working directory')")
    verifiers = next(e.module for e in entry_points("verifiers") if e.name == "eval")
    result = run(scripts / "eval", verifiers, "--no-such-key", "3", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "error: unknown key --no-such-key; see `eval --help`\n")


def test_eval_other_scripts_are_not_replaced(scripts, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    elsewhere = tmp_path / "elsewhere" / "eval"
    elsewhere.write_text("print('mine')")
    result = subprocess.run([scripts / "python", elsewhere], capture_output=True, text=True, timeout=60)
    assert result.stdout == "mine\n"
    result = run(scripts / "eval", "prime_rl.entrypoints.eval", "--no-such-key", "3", cwd=tmp_path)
    assert result.returncode == 2


def test_console_scripts_only_eval_has_two_owners():
    """A new release of a dependency could add another conflict."""
    ours = {e.name for e in entry_points("prime-rl")}
    others = {
        e.name
        for d in importlib.metadata.distributions()
        if d.name.lower() != "prime-rl"
        for e in d.entry_points
        if e.group == "console_scripts"
    }
    assert ours & others == {"eval"}


def entry_points(package: str) -> list[importlib.metadata.EntryPoint]:
    return [e for e in importlib.metadata.distribution(package).entry_points if e.group == "console_scripts"]
