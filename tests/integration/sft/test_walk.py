"""The walk of docs/sft.md as it is typed: a run, its best rollouts, SFT on them, and a run from the new weights."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.storage.paths import RunPaths
from tests.support.server import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[3]


def metrics(output_dir: Path, role: str, name: str) -> list[float]:
    lines = RunPaths(output_dir).metrics(role).read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def test_sft_on_the_best_rollouts_raises_the_reward_that_a_run_starts_with(tmp_path: Path) -> None:
    section = (ROOT / "docs/sft.md").read_text().partition("## From rollouts to SFT")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    for line in block[1].replace("\\\n", " ").splitlines():
        command, *arguments = shlex.split(line.removeprefix("uv run ").replace("outputs/", f"{tmp_path}/"))
        if command == "rl":
            arguments += ["--inference.server.port", str(free_port())]
        if "second" in line:
            arguments += ["--max-steps", "1"]
        run = [sys.executable, "-m", f"prime_rl.entrypoints.{command}", *arguments]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    samples = [json.loads(line) for line in (tmp_path / "best/synthesis/samples.jsonl").read_text().splitlines()]
    keys = [(sample["env"], sample["example"]) for sample in samples]
    assert len(keys) == len(set(keys)) > 100 and {sample["reward"] for sample in samples} == {1.0}
    losses = metrics(tmp_path / "sft", "trainer", "loss")
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    base, tuned = (metrics(tmp_path / name, "orchestrator", "reward/mean")[0] for name in ("first", "second"))
    print(f"losses {losses[0]:.3f} -> {losses[-1]:.3f}; reward of the first batch {base:.3f} -> {tuned:.3f}")
    assert tuned > base + 0.05
