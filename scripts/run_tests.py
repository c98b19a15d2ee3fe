"""Run tests, then those that failed once more, alone: what passes then is unstable, and reported as such.

    uv run --extra cpu python scripts/run_tests.py [ARGUMENTS OF PYTEST]

Exit code: 0 if at most three tests are unstable and none fails twice, otherwise that of pytest, or 1.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

MAX_UNSTABLE = 3


def main() -> int:
    """Run the tests and print the unstable ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = _run_pytest(folder, *sys.argv[1:])
        failed = _read_failed(folder)
        if code != 1 or not failed:
            return code
        if len(failed) > MAX_UNSTABLE:
            print(f"gate: {len(failed)} tests failed; up to {MAX_UNSTABLE} would run again")
            return 1
        first = _read_reasons(folder)
        print(f"gate: {len(failed)} of the tests failed and run again, alone", flush=True)
        code = _run_pytest(folder, "-n", "0", *failed)
        again = _read_failed(folder)
        for test in failed:
            result = "failed again" if test in again else "passed alone"
            print(f"gate: {'broken' if test in again else 'unstable'}: {test}: failed ({first.get(test)}), {result}")
        return code


def _run_pytest(folder: Path, *arguments: str) -> int:
    """Return pytest's exit code; the failed tests and the reasons are in files of `folder` then."""
    options = [f"--override-ini=cache_dir={folder}", f"--junit-xml={folder}/results.xml"]
    (folder / "v/cache/lastfailed").unlink(missing_ok=True)
    return subprocess.run([sys.executable, "-m", "pytest", *options, *arguments]).returncode


def _read_failed(folder: Path) -> list[str]:
    file = folder / "v/cache/lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def _read_reasons(folder: Path) -> dict[str, str]:
    """Return the first line of each failure by the test's node id."""
    reasons = dict[str, str]()
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        if (result := next((child for child in case if child.tag in ("failure", "error")), None)) is not None:
            module, _, name = f"{case.get('classname')}".replace(".", "/"), None, case.get("name")
            reasons[f"{module}.py::{name}"] = (result.get("message") or "no message").splitlines()[0][:200]
    return reasons


if __name__ == "__main__":
    sys.exit(main())
