"""`rl` with a server of its own: a synchronous run from start to end, and two runs side by side that end badly."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs import RLConfig
from prime_rl.run.artifact import MANIFEST
from prime_rl.run.heartbeat import ENDED, read_beats
from prime_rl.run.paths import RunPaths, steps_in
from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import END_TIMEOUT_S, Command, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
SECRET = "k-51c0ffee"
ORCHESTRATOR_METRICS = {
    "step", "reward/mean", "reward/std", "staleness/max", "staleness/mean", "tokens/wasted", "time/step",
    "time/wait_for_policy", "seq_len/mean", "is_truncated/mean", "perf/rollouts_per_second",
}  # fmt: skip
TRAINER_METRICS = {
    "step", "loss", "grad_norm", "entropy", "mismatch_kl", "mismatch_kl/on_policy", "importance_ratio/mean", "lr",
    "time/step", "time/wait_for_batch", "time/publish", "perf/tokens_per_second", "perf/mfu",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def manifest(paths: RunPaths, step: int) -> dict[str, Any]:
    return json.loads((paths.rollouts(step) / MANIFEST).read_text())


def assert_all_alive(run: Command) -> None:
    """The server and its engine, the orchestrator, the launcher and its rank."""
    assert len(run.engines()) == 1
    assert run.role("orchestrator").is_running()
    assert len(run.ranks()) == 1


def test_a_synchronous_run_from_start_to_end(
    start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At k = 0 every token is the current policy's: no staleness, and the trainer agrees with the sampler (I6)."""
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", SECRET)
    values = rl_values(tmp_path / "run", inference=own_server(), max_steps=STEPS, async_level=0)
    run = start("rl", values, tmp_path / "run")
    run.until_step("orchestrator", 0)
    assert_all_alive(run)
    assert run.end() == 0, run.story()

    shipped, trained = metrics_of(run.paths, "orchestrator"), metrics_of(run.paths, "trainer")
    assert [line["step"] for line in shipped] == [line["step"] for line in trained] == list(range(STEPS))
    for line in shipped:
        assert line.keys() >= ORCHESTRATOR_METRICS
        assert (line["staleness/max"], line["staleness/mean"], line["tokens/wasted"]) == (0, 0, 0)
        if line["policy/version"] > 0:
            assert line["canary/max_logprob_difference"] <= 1e-4, "inference says what the trainer says"
    for line in trained:
        assert line.keys() >= TRAINER_METRICS
        assert 0 <= line["mismatch_kl/on_policy"] < 1e-4
        assert line["grad_norm"] > 0
    for step in range(STEPS):
        told = manifest(run.paths, step)
        assert (told["step"], told["min_version"], told["max_version"]) == (step, step, step)
        assert (told["async_level"], told["sequences"]) == (0, 16)
        assert len(run.paths.samples(step).read_text().splitlines()) == 16
    assert steps_in(run.paths.weights_dir)[-1] == STEPS
    beats = read_beats(run.paths)
    assert beats.keys() >= {"inference", "orchestrator", "trainer_0"}
    assert {beat.phase for beat in beats.values()} == {ENDED}
    assert RLConfig.load(["@", str(run.paths.run_toml)]).max_steps == STEPS
    assert f"{STEPS} of {STEPS}" in run.output
    assert run.errors == ""
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()], "the key is in no file"


@pytest.mark.extended
def test_two_runs_side_by_side_and_how_they_end(start: StartCommand, tmp_path: Path) -> None:
    """Ctrl-C ends one and leaves the other alone; the death of its engine ends the other, and is told."""
    left, right = (
        start("rl", rl_values(tmp_path / n, inference=own_server()), tmp_path / n) for n in ("left", "right")
    )
    for run in (left, right):
        run.until_step("trainer", 0)

    left.process.send_signal(signal.SIGINT)
    assert left.end(END_TIMEOUT_S, beside=right) == 128 + signal.SIGINT, left.story()
    assert "stopped by SIGINT; all processes have ended" in left.output
    assert left.errors == ""

    right.until_step("trainer", len(metrics_of(right.paths, "trainer")) + 1)
    [engine] = right.engines()
    os.kill(engine.pid, signal.SIGKILL)
    assert right.end(END_TIMEOUT_S) == 1, right.story()
    [error] = right.errors.splitlines()
    assert error.startswith("error: inference ended with exit code 1: EngineCore (pid")
    assert str(right.paths.log("inference")) in error
