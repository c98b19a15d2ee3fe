"""Each environment's wheel works by itself: after a plain `pip install` in an empty virtual environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "environments"
PUBLISHED = {"verifiers", "math-verify", "pint", "reasoning-gym"}
"""Names that the public package index holds and that are the packages we mean."""

QUESTION = {"question": "What is 1 + 1?", "answer": "2"}
CHOICE = {"question": "What is 1 + 1?", "options": ["A)1", "B)2"], "correct": "B", "rationale": "count"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "agentic": {"task": "repair", "num_generated": 2},
    "alphabet_sort": {"num_train_examples": 2},
    "calculator": {"num_train_examples": 2},
    "code_tests": {"num_generated": 2},
    "dataset": {"data_path": "question.jsonl", "grader": "math"},
    "gsm8k": {"data_path": "question.jsonl"},
    "hendrycks_math": {"data_path": "question.jsonl"},
    "intellect_math": {"data_path": "question.jsonl"},
    "logic": {"num_generated": 4},
    "nanochat_aqua_rat": {"data_dir": "choices", "eval_split": None},
    "python_tool": {"num_generated": 2},
    "reasoning_gym_tasks": {"num_train_examples": 2, "num_eval_examples": 0},
    "research": {"num_towns": 2},
    "reverse_text": {"words": 2},
    "science": {"num_generated": 2},
}
SANDBOXED = {"agentic", "code_tests", "python_tool"}
"""Environments that run code: the sandbox is installed beside them."""

# Run with -I, so that nothing but the installed wheel can be imported. A `MathGrader` starts a file of the wheel.
LOAD = """
import importlib, pkgutil, sys
name, arguments = sys.argv[1], eval(sys.argv[2])
package = importlib.import_module(name)
assert "site-packages" in package.__file__, package.__file__
for module in pkgutil.walk_packages(package.__path__, f"{name}."):
    if not module.name.endswith("math_worker"):
        importlib.import_module(module.name)
environment = package.load_environment(**arguments)
assert len(environment.get_dataset()) > 0
if grader := getattr(environment.rubric, "grader", None):
    import asyncio
    assert asyncio.run(grader.grade("2", "4/2")).correct
    grader.close()
if sandbox := getattr(environment, "sandbox", None):
    import asyncio
    async def run():
        result = await (await sandbox.open()).run("print(1 + 1)")
        await sandbox.close()
        return result.stdout
    assert asyncio.run(run()) == "2\\n"
print("loaded", name)
"""


def projects() -> list[Path]:
    folders = (path.parent for path in FOLDER.glob("*/pyproject.toml"))
    classic = (folder for folder in folders if (folder / folder.name / "environment.py").exists())
    return sorted(folder for folder in classic if not folder.is_symlink())


def test_arguments_cover_every_environment() -> None:
    assert [project.name for project in projects()] == sorted(ARGUMENTS)


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_environment_requires_only_published_packages(project: Path) -> None:
    declared = tomllib.loads((project / "pyproject.toml").read_text())
    names = {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in declared["project"]["dependencies"]}
    assert "verifiers" in names <= PUBLISHED
    # A source that only uv reads would let a wheel require something else than what was tested.
    assert "sources" not in declared.get("tool", {}).get("uv", {})


class Bases:
    """Virtual environments with the packages that environments require, installed once and then copied."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def copy(self, *packages: str | Path, target: Path) -> Path:
        """Copy the environment with these packages, and return the copy's interpreter."""
        base = self._root / "_".join(Path(package).name for package in packages)
        if not base.exists():
            run("uv", "venv", "--seed", "--python", sys.executable, base, cwd=self._root)
            python = base / "bin" / "python"
            # Compiled once, or each copy would compile all packages again.
            run("uv", "pip", "install", "--compile-bytecode", "--python", python, *packages, cwd=self._root)
        shutil.copytree(base, target, symlinks=True, copy_function=os.link)
        return target / "bin" / "python"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_wheel_installed_by_pip_in_an_empty_venv_loads(project: Path, bases: Bases, tmp_path: Path) -> None:
    # Only the folder itself: the wheel must not depend on where it was built.
    shutil.copytree(project, tmp_path / "source", symlinks=False)
    sandbox = [REPOSITORY / "packages/sandbox"] if project.name in SANDBOXED else []
    python = bases.copy("verifiers", *sandbox, target=tmp_path / "venv")
    run("uv", "build", "--quiet", "--wheel", "--out-dir", tmp_path, tmp_path / "source", cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    pip(python, "install", "--no-compile", wheel, cwd=tmp_path)
    (tmp_path / "question.jsonl").write_text(json.dumps(QUESTION) + "\n")
    (tmp_path / "choices").mkdir()
    (tmp_path / "choices" / "train.jsonl").write_text(json.dumps(CHOICE) + "\n")
    printed = run(python, "-I", "-c", LOAD, project.name, repr(ARGUMENTS[project.name]), cwd=tmp_path)
    assert f"loaded {project.name}" in printed


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_wheels_of_prime_rl_and_its_packages_work_without_the_checkout(tmp_path: Path) -> None:
    run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", tmp_path / "dist", cwd=REPOSITORY)
    run("uv", "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    run("uv", "pip", "install", "--python", python, "--find-links", tmp_path / "dist", "prime-rl", cwd=tmp_path)
    program = "from prime_rl.sandbox.sandbox import Sandbox; print(Sandbox.__module__)"
    assert run(python, "-I", "-c", program, cwd=tmp_path) == "prime_rl_sandbox.sandbox\n"


def pip(python: Path, command: str, *arguments: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", command, "--quiet", *arguments, cwd=cwd)


def run(*command: str | Path, cwd: Path) -> str:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=outside, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout
