"""Which tests a command line selects: the extended ones only with their own flag."""

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
    (["-m", "not slow"], {"plain", "gpu"}),
    (["--extended"], {"plain", "slow", "gpu", "extended", "extended_slow"}),
    (["-m", "extended"], {"extended", "extended_slow"}),
    (["-m", "extended and not slow"], {"extended"}),
    (["-m", "not extended and not gpu"], {"plain", "slow"}),
    (["-m", "slow or gpu"], {"slow", "gpu"}),
    (["--extended", "-m", "extended"], {"extended", "extended_slow"}),
    (["--extended", "-m", "extended and not slow"], {"extended"}),
]
COLLECT_ALL = f"""
import pytest
for arguments, _ in {CASES}:
    print("case", flush=True)
    pytest.main(["--collect-only", "-q", "-n", "0", *arguments])
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each case; one process collects all, because the imports take two seconds."""
    root = tmp_path_factory.mktemp("selection")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", root / "tests")
    (root / "tests/test_it.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-c", COLLECT_ALL], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("case\n")[1:]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(arguments) for arguments, _ in CASES])
def test_marks_select_the_documented_tests(outputs: list[str], number: int) -> None:
    assert len(outputs) == len(CASES)
    found = {line.split("::test_")[1] for line in outputs[number].splitlines() if "::test_" in line}
    assert found == CASES[number][1], outputs[number]
