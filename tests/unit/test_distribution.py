"""Which tests a command line selects."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.gpu
def test_gpu(): pass

@pytest.mark.extended
def test_extended(): pass

@pytest.mark.extended
@pytest.mark.slow
def test_extended_slow(): pass
"""


CASES: list[tuple[list[str], set[str]]] = [
    ([], {"plain", "slow", "gpu"}),
    (["-m", "not gpu"], {"plain", "slow"}),
    (["--extended"], {"plain", "slow", "gpu", "extended", "extended_slow"}),
    (["-m", "extended and not slow"], {"extended"}),
    (["-m", "slow or gpu"], {"slow", "gpu"}),
    (["--extended", "-m", "extended and not slow"], {"extended"}),
]
COLLECT_ALL = f"""
import pytest
for arguments, _ in {CASES}:
    print("case", flush=True)
    pytest.main(["--collect-only", "-q", "-n", "0", *arguments])
"""


@pytest.mark.extended
def test_marks_select_the_documented_tests(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/support/run_order.py", tmp_path / "conftest.py")
    (tmp_path / "tests/test_it.py").write_text(TESTS)
    command = [sys.executable, "-c", COLLECT_ALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split("case\n")[1:]
    found = [{line.split("::test_")[1] for line in text.splitlines() if "::test_" in line} for text in outputs]
    assert found == [expected for _, expected in CASES]
