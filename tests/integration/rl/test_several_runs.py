"""Three LoRA runs on two slots of one trainer and one server: kill, wait, resume, stop."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import ORCHESTRATOR, StartCommand, own_server, rl_values
from tests.support.command import json_lines, metrics_of, until

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20  # many enough that the third run starts its processes before the first two have finished


def values(root: Path, **more: object) -> dict[str, object]:
    given = rl_values(root, inference=own_server(), max_steps=STEPS, ckpt={"interval": 2}, **more)
    given["trainer"] = {"optim": {"lr": 1e-2}, "max_concurrent_runs": 2, "model": {"lora": {"rank": 8}}}
    return given


def process_of(paths: RunPaths, name: str) -> psutil.Process:
    return psutil.Process(json.loads(paths.heartbeat(name).read_text())["pid"])


def check_finished(paths: RunPaths, branch: int) -> None:
    """Every batch was sampled and trained once within the bound, and the versions are the run's own."""
    shipped = [line for line in metrics_of(paths, "orchestrator") if "staleness/max" in line]
    trained = metrics_of(paths, "trainer")
    assert [line["step"] for line in shipped] == [line["step"] for line in trained] == list(range(STEPS))
    assert all(line["staleness/max"] <= 2 for line in shipped)
    on_policy = [line["mismatch_kl/on_policy"] for line in trained if line["mismatch_kl/on_policy"] is not None]
    assert on_policy and max(on_policy) < 1e-4
    assert json.loads((paths.weights(STEPS) / "manifest.json").read_text())["branch"] == branch


def test_killed_run_resumes_in_its_folder_while_others_train(start: StartCommand, tmp_path: Path) -> None:
    """alpha is killed, gamma waits for its slot, alpha resumes from its checkpoint; all end with all steps."""
    root = tmp_path / "out"
    alpha, beta, gamma = (RunPaths(root / f"run_{name}") for name in ("alpha", "beta", "gamma"))
    slow = {"orchestrator": {**ORCHESTRATOR, "batch_size": 64}, "heartbeat": {"dead_after_seconds": 6}}
    first = start("rl", values(root, runs={"alpha": {}, "beta": {"model": {"lora": {"rank": 4}}}}, **slow), root)
    first.until(lambda: alpha.heartbeat("trainer_0").exists(), "the slot of alpha")
    joins = start("rl", values(root, join=str(root), exp_id="gamma"), tmp_path / "gamma")
    first.until(lambda: gamma.heartbeat("orchestrator").exists(), "the orchestrator of gamma, which keeps the trainer")
    first.until(lambda: (alpha.checkpoint(2) / "COMMITTED").exists(), "a checkpoint of alpha")
    process_of(alpha, "orchestrator").kill()
    first.until(lambda: metrics_of(gamma, "trainer") != [], "the first step of gamma")
    resumed = start(
        "orchestrator", {}, tmp_path / "alpha", "@", str(alpha.config("orchestrator")), "--ckpt.resume-step", "-1"
    )
    assert joins.process.wait(300) == 0, joins.story()
    assert resumed.process.wait(300) == 0, resumed.story()
    assert first.end() != 0, "alpha was killed"
    check_finished(beta, 0)
    check_finished(gamma, 0)
    check_finished(alpha, 1)
    assert [event["name"] for event in json_lines(RunPaths(root).events) if event["event"] == "failed"] == ["run_alpha"]


def test_runs_go_on_after_their_server_and_trainer_were_killed(start: StartCommand, tmp_path: Path) -> None:
    """`rl` restarts both: the server gets the adapters of both runs again, the trainer resumes their checkpoints."""
    root = tmp_path / "out"
    runs = [RunPaths(root / f"run_{name}") for name in ("alpha", "beta")]
    slow = {"orchestrator": {**ORCHESTRATOR, "batch_size": 64}, "max_restarts": 2}
    first = start("rl", values(root, runs={"alpha": {}, "beta": {"optim": {"lr": 1e-3}}}, **slow), root)
    first.until(lambda: all(metrics_of(run, "trainer") for run in runs), "a step of each")
    process_of(RunPaths(root), "inference").kill()
    first.until(lambda: all((run.checkpoint(4) / "COMMITTED").exists() for run in runs), "a checkpoint of each")
    process_of(RunPaths(root), "trainer_0").kill()
    assert first.process.wait(400) == 0, first.story()
    for run in runs:
        check_finished(run, 1)


def test_stopped_runs_resume_together(start: StartCommand, tmp_path: Path) -> None:
    """SIGTERM to `rl` saves a checkpoint of each run, and the recorded configuration resumes both."""
    root = tmp_path / "out"
    runs = [RunPaths(root / f"run_{name}") for name in ("alpha", "beta")]
    given = values(root, runs={"alpha": {}, "beta": {"optim": {"lr": 1e-3}}})
    first = start("rl", {**given, "ckpt": {"interval": 100}}, root)
    first.until(lambda: all(len(metrics_of(run, "trainer")) > 2 for run in runs), "three steps of each")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 128 + signal.SIGTERM, first.story()
    until(lambda: all(list(run.checkpoints_dir.glob("step_*/COMMITTED")) for run in runs), "checkpoints", 5)
    second = start("rl", {}, tmp_path / "again", "@", str(RunPaths(root).run_toml), "--ckpt.resume-step", "-1")
    assert second.process.wait(400) == 0, second.story()
    for run in runs:
        check_finished(run, 1)
