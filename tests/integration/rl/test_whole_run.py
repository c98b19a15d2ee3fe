"""`rl` with its own server: a synchronous run with a killed rank, and two concurrent runs that fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.liveness.heartbeat_monitor import ENDED, read_heartbeats
from prime_rl.storage.artifact import MANIFEST
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths, steps_in
from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import END_TIMEOUT_SECONDS, Command, metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 5
SECRET = "k-51c0ffee"
ORCHESTRATOR_METRICS = {
    "step", "reward/mean", "reward/std", "staleness/max", "staleness/mean", "tokens/unaccounted", "time/step",
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


def test_synchronous_run_completes_although_a_rank_is_killed(
    start: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At k = 0 every token is sampled by the current policy: no staleness, and the trainer agrees with it (I1, I3, I6).

    The killed rank resumes from the checkpoint of step 2.
    """
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", SECRET)
    values = rl_values(
        tmp_path / "run", inference=own_server(), max_steps=STEPS, async_level=0, max_restarts=1, ckpt={"interval": 2}
    )
    run = start("rl", values, tmp_path / "run")
    run.until_step("orchestrator", 0)
    assert_all_alive(run)
    run.until(lambda: 2 in find_checkpoints(run.paths.checkpoints_dir).steps, "the checkpoint of step 2")
    os.kill(run.ranks()[0].pid, signal.SIGKILL)
    assert run.end() == 0, run.story()

    shipped, trained = metrics_of(run.paths, "orchestrator"), metrics_of(run.paths, "trainer")
    assert [line["step"] for line in shipped] == [line["step"] for line in trained] == list(range(STEPS))
    for line in shipped:
        assert line.keys() >= ORCHESTRATOR_METRICS
        assert (line["staleness/max"], line["staleness/mean"], line["tokens/unaccounted"]) == (0, 0, 0)
    differences = [line["canary/max_logprob_difference"] for line in shipped if "canary/max_logprob_difference" in line]
    assert len(differences) >= 2 and max(differences) <= 1e-4, "inference and trainer agree on the canary"
    for line in trained:
        assert line.keys() >= TRAINER_METRICS
        assert 0 <= line["mismatch_kl/on_policy"] < 1e-4
        assert line["grad_norm"] > 0
    events = [json.loads(line) for line in run.paths.events.read_text().splitlines()]
    assert [event["name"] for event in events if event["event"] == "restarted"] == ["trainer"]
    manifests = [manifest(run.paths, step) for step in range(STEPS)]
    groups = [group for shipped_batch in manifests for group in shipped_batch["group_ids"]]
    assert len(groups) == len(set(groups)) == STEPS * 4, "every group is trained on exactly once"
    for step, shipped_batch in enumerate(manifests):
        versions = (shipped_batch["step"], shipped_batch["min_version"], shipped_batch["max_version"])
        assert versions == (step, step, step)
        assert (shipped_batch["async_level"], shipped_batch["sequences"]) == (0, 16)
        assert len(run.paths.samples(step).read_text().splitlines()) == 16
    assert steps_in(run.paths.weights_dir)[-1] == STEPS
    beats = read_heartbeats(run.paths)
    assert beats.keys() >= {"inference", "orchestrator", "trainer_0"}
    assert {beat.phase for beat in beats.values()} == {ENDED}
    assert RLConfig.load(["@", str(run.paths.run_toml)]).max_steps == STEPS
    assert f"{STEPS} of {STEPS}" in run.output
    assert run.errors == ""
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()], "the key is in no file"


@pytest.mark.extended
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "falcon_h1",
        "qwen3_moe",
        *[pytest.param(name, marks=pytest.mark.release) for name in ("granitemoehybrid", "nemotron_h", "lfm2")],
    ],
)
def test_model_of_a_family_agrees_with_its_server_although_a_rank_is_killed(
    start: StartCommand, tmp_path: Path, family: str
) -> None:
    """Recurrent layers and experts: packed rows, publications, caches after a switch, and a resume (I6)."""
    script = Path(__file__).parents[3] / "scripts/make_tiny_model.py"
    subprocess.run([sys.executable, str(script), family, str(tmp_path / "model")], check=True)
    values = rl_values(
        tmp_path / "run", inference=own_server(), max_steps=STEPS, async_level=0, max_restarts=1, ckpt={"interval": 2}
    )
    if family == "qwen3_moe":
        values["trainer"] |= {"model": {"router_replay": True}}
    run = start("rl", {**values, "model": {"name": str(tmp_path / "model")}}, tmp_path / "run")
    run.until(lambda: 2 in find_checkpoints(run.paths.checkpoints_dir).steps, "the checkpoint of step 2")
    os.kill(run.ranks()[0].pid, signal.SIGKILL)
    assert run.end() == 0, run.story()
    shipped, trained = metrics_of(run.paths, "orchestrator"), metrics_of(run.paths, "trainer")
    assert [line["step"] for line in trained] == list(range(STEPS))
    assert max(line["mismatch_kl/on_policy"] for line in trained) < 1e-6
    assert max(line.get("canary/max_logprob_difference", 0) for line in shipped) <= 1e-4
    assert {line.get("routing/replayed") for line in trained} == ({1.0} if family == "qwen3_moe" else {None})


@pytest.mark.extended
def test_concurrent_runs_end_independently(start: StartCommand, tmp_path: Path) -> None:
    """Ctrl-C ends one run only; the other one ends with an error after its engine was killed."""
    left, right = (
        start("rl", rl_values(tmp_path / n, inference=own_server()), tmp_path / n) for n in ("left", "right")
    )
    for run in (left, right):
        run.until_step("trainer", 0)

    left.process.send_signal(signal.SIGINT)
    assert left.end(END_TIMEOUT_SECONDS, beside=right) == 128 + signal.SIGINT, left.story()
    assert "stopped by SIGINT; all processes have ended" in left.output
    assert left.errors == ""

    right.until_step("trainer", len(metrics_of(right.paths, "trainer")) + 1)
    [engine] = right.engines()
    os.kill(engine.pid, signal.SIGKILL)
    assert right.end(END_TIMEOUT_SECONDS) == 1, right.story()
    [error] = right.errors.splitlines()
    assert error.startswith("error: inference exited with code 1: EngineCore (pid")
    assert str(right.paths.log("inference")) in error
