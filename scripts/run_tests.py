"""Run tests, then those that failed once more, alone: what passes then is unstable, and reported as such.

    uv run --extra cpu python scripts/run_tests.py [ARGUMENTS OF PYTEST]

Exit code: 0 if at most three tests are unstable and none fails twice, otherwise that of pytest, or 1.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

MAX_UNSTABLE = 3


def main() -> int:
    """Run the tests and print the unstable ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Each worker would rewrite the assertions of all files; the second time shows the values.
        code = _run_pytest(folder, "--assert=plain", *sys.argv[1:])
        reasons = _read_reasons(folder)
        failed = sorted({*_read_failed(folder), *_find_crashed(reasons)})
        if code != 1:
            return code
        if not 0 < len(failed) <= MAX_UNSTABLE:
            print(f"gate: {len(failed)} tests failed, which are too many to run again:", *failed, sep="\n  ")
            return 1
        print("gate: run again, alone:", *failed, sep="\n  ", flush=True)
        code = _run_pytest(folder, "-n", "0", *(argument for argument in sys.argv if argument == "--extended"), *failed)
        broken = _read_failed(folder)
        for test in failed:
            kind, result = ("broken", "failed again") if test in broken or code > 1 else ("unstable", "passed alone")
            print(f"gate: {kind}: {test}: failed ({reasons.get(test, 'no reason recorded')}), {result}")
        return code


def _run_pytest(folder: Path, *arguments: str) -> int:
    """Return pytest's exit code; the failed tests and the reasons are in files of `folder` then."""
    options = [f"--override-ini=cache_dir={folder}", f"--junit-xml={folder}/results.xml"]
    (folder / "v/cache/lastfailed").unlink(missing_ok=True)
    return subprocess.run([sys.executable, "-m", "pytest", *options, *arguments]).returncode


def _read_failed(folder: Path) -> list[str]:
    file = folder / "v/cache/lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def _find_crashed(reasons: Mapping[str, str]) -> list[str]:
    """Return the tests during which a worker died: pytest does not record them as failed."""
    matches = (re.search("crashed while running '(.*)'", reason) for reason in reasons.values())
    return [match[1] for match in matches if match]


def _read_reasons(folder: Path) -> dict[str, str]:
    """Return the first line of each failure by the test's node id."""
    reasons, file = dict[str, str](), folder / "results.xml"
    for case in ElementTree.parse(file).iter("testcase") if file.exists() else ():
        if (result := next((child for child in case if child.tag in ("failure", "error")), None)) is not None:
            test = f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}"
            reasons[test] = (result.get("message") or "no message").splitlines()[0][:400]
    return reasons


if __name__ == "__main__":
    sys.exit(main())
