"""Metrics on disk, and W&B in offline mode and with a fake."""

import json
import resource
import threading
import time
from unittest import mock

import numpy as np
import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.shared.blocks import WandbConfig, WandbExtrasConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.monitors import Monitor
from prime_rl.storage.paths import RunPaths

ROWS = [
    {"group_id": 0, "reward": 0.5, "messages": [{"role": "user", "content": "a"}]},
    {"group_id": 1, "reward": 1.0, "messages": []},
]


class FakeRun:
    id = "its-own"

    def __init__(self):
        self.logged, self.finished = [], False

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    """wandb.init() that records its arguments."""
    import wandb

    run, calls = FakeRun(), []

    def init(**kwargs):
        calls.append(kwargs)
        return run

    monkeypatch.setattr(wandb, "init", init)
    return run, calls


def lines(paths, role):
    """Return the lines of a file of metrics, without their time."""
    found = [json.loads(line) for line in paths.metrics(role).read_text().splitlines()]
    assert all(isinstance(line.pop("time", 0.0), float) for line in found)
    return found


def test_monitor_log_adds_the_wall_clock_time(tmp_path):
    paths, before = RunPaths(tmp_path), time.time()
    Monitor(paths, "trainer", None).log(3, {"loss": 0.5})
    (line,) = [json.loads(line) for line in paths.metrics("trainer").read_text().splitlines()]
    assert list(line)[:2] == ["step", "time"]
    assert before <= line["time"] <= time.time()


def test_monitor_log_writes_one_object_per_step(tmp_path):
    paths = RunPaths(tmp_path)
    monitor = Monitor(paths, "trainer", None)
    monitor.log(0, {"loss": np.float32(0.5), "tokens": np.int64(7), "lr": 1.0, "optim/skipped": True})
    assert lines(paths, "trainer") == [{"step": 0, "loss": 0.5, "tokens": 7, "lr": 1.0, "optim/skipped": 1}]
    monitor.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "mismatch_kl/on_policy": None})
    monitor.log_samples(1, ROWS)
    monitor.log_distributions(1, {"reward": [1.0]})
    monitor.close()
    assert lines(paths, "trainer")[1] == {"step": 1, "loss": None, "grad_norm": None, "mismatch_kl/on_policy": None}
    assert isinstance(lines(paths, "trainer")[0]["tokens"], int)
    Monitor(paths, "trainer", None).log(2, {})
    assert [line["step"] for line in lines(paths, "trainer")] == [0, 1, 2]


def test_monitor_without_wandb_does_not_import_it(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from prime_rl.monitors import Monitor; "
        "from prime_rl.storage.paths import RunPaths; "
        f"Monitor(RunPaths(Path({str(tmp_path)!r})), 'trainer', None); "
        "print('wandb' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_wandb_run_is_started_as_configured(tmp_path, fake_wandb):
    run, calls = fake_wandb
    rl = RLConfig.load(["--wandb.name", "x", "--wandb.project", "p", "--wandb.offline", "--wandb.id", "abc"])
    Monitor(RunPaths(tmp_path), "trainer", [rl.trainer.wandb], rl.trainer).close()
    Monitor(RunPaths(tmp_path), "orchestrator", [rl.orchestrator.wandb]).close()
    first, second = calls
    assert (first["name"], second["name"]) == ("x-trainer", "x-orchestrator")
    assert (first["id"], first["resume"]) == ("abc", "allow")
    assert (second["id"], second["resume"]) == (None, None)
    assert {call["project"] for call in calls} == {"p"}
    assert {call["mode"] for call in calls} == {"offline"}
    assert {call["group"] for call in calls} == {"x"}
    assert first["config"]["optim"]["lr"] == TrainerConfig().optim.lr
    assert first["dir"] == tmp_path
    assert run.finished


def test_wandb_resumed_process_continues_its_own_run(tmp_path, fake_wandb):
    _, calls = fake_wandb
    new, resumed = (RLConfig.load(["--wandb.offline", *keys]) for keys in ([], ["--ckpt.resume-step", "-1"]))
    for rl in (new, resumed, new):
        Monitor(RunPaths(tmp_path), "trainer", [rl.trainer.wandb], rl.trainer).close()
    Monitor(RunPaths(tmp_path), "orchestrator", [resumed.orchestrator.wandb], resumed.orchestrator).close()
    assert [(call["id"], call["resume"]) for call in calls] == [
        (None, None), (FakeRun.id, "allow"), (None, None), (None, None),
    ]  # fmt: skip


def test_wandb_tables_follow_interval_and_configuration(tmp_path, fake_wandb):
    run, _ = fake_wandb

    def log(extras):
        run.logged.clear()
        monitor = Monitor(RunPaths(tmp_path), "orchestrator", [WandbConfig(log_extras=extras)])
        for step in range(4):
            monitor.log(step, {"reward/mean": 1.0, "reward/std": None})
            monitor.log_samples(step, ROWS)
            monitor.log_distributions(step, {"reward": np.array([[0.0, 1.0], [2.0, np.nan]]), "empty": []})
        monitor.close()
        return run.logged

    assert log(None) == [{"step": step, "reward/mean": 1.0} for step in range(4)]
    logged = log(WandbExtrasConfig(interval=2))
    samples = [values for values in logged if "samples" in values]
    assert [values["step"] for values in samples] == [0, 2]
    assert samples[0]["samples"].columns == ["step", "group_id", "reward", "messages"]
    assert samples[0]["samples"].data[0] == [0, 0, 0.5, '[{"role": "user", "content": "a"}]']
    spread = [values for values in logged if "distributions" in values]
    assert [values["step"] for values in spread] == [0, 2]
    ((step, name, count, mean, low, *_, high),) = spread[1]["distributions"].data
    assert (step, name, count, mean, low, high) == (2, "reward", 3, 1.0, 0.0, 2.0)
    assert "distributions/reward" in spread[0]
    assert not any("distributions" in values for values in log(WandbExtrasConfig(distributions=False, interval=1)))
    assert not any("samples" in values for values in log(WandbExtrasConfig(samples=False, interval=1)))


def test_wandb_logs_every_evaluation(tmp_path, fake_wandb):
    run, _ = fake_wandb
    monitor = Monitor(RunPaths(tmp_path), "eval", [WandbConfig(log_extras=WandbExtrasConfig(interval=10))])
    for version in (0, 7):
        monitor.log_samples(version, ROWS)
        monitor.log_distributions(version, {"toy/reward": [0.0, 1.0]})
    monitor.close()
    assert [values["step"] for values in run.logged] == [0, 0, 7, 7]


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("UsageError", "api_key not configured (no-tty).\nmore"),
        ("CommError", "entity not found\nmore"),
        ("Error", "Error initializing run: input: permission denied\nmore"),
    ],
)
def test_wandb_rejected_settings_are_one_line(tmp_path, monkeypatch, kind, refusal):
    import wandb

    monkeypatch.setattr(wandb, "init", mock.Mock(side_effect=getattr(wandb.errors, kind)(refusal)))
    with pytest.raises(ConfigError, match="wandb login") as caught:
        Monitor(RunPaths(tmp_path), "trainer", [WandbConfig()])
    assert "more" not in str(caught.value)


def test_wandb_that_cannot_be_reached_is_logged_offline_with_a_warning(tmp_path, monkeypatch, said):
    import wandb

    init, modes = wandb.init, []

    def unreachable(**settings):
        modes.append(settings["mode"])
        if settings["mode"] == "online":
            raise wandb.errors.CommError("Timed out while retrying: no route\nmore")
        return init(**settings)

    monkeypatch.setattr(wandb, "init", unreachable)
    monitor = Monitor(RunPaths(tmp_path), "trainer", [WandbConfig()])
    monitor.log(0, {"loss": 1.0})
    monitor.close()
    assert modes == ["online", "offline"] and list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    (line,) = [line for line in said() if "W&B" in line]
    assert "W&B cannot be reached; this run is logged offline" in line and "more" not in line


def test_wandb_offline_run_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", "k-51c0ffee")
    config = WandbConfig(offline=True, name="x-trainer", log_extras=WandbExtrasConfig(interval=1))
    monitor = Monitor(RunPaths(tmp_path), "trainer", [config], RLConfig())
    monitor.log(0, {"loss": 1.0})
    monitor.log_samples(0, ROWS)
    monitor.log_distributions(0, {"reward": [0.0, 1.0]})
    monitor.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in run.rglob("*.table.json")}
    assert tables["samples"]["data"][1][2] == 1.0
    assert tables["distributions"]["data"][0][1] == "reward"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"api_key_var" in path.read_bytes() for path in written), "the configuration is there"
    assert not any(b"k-51c0ffee" in path.read_bytes() for path in written), "and the key is not"


def test_metrics_file_incomplete_line_is_removed(tmp_path):
    paths = RunPaths(tmp_path)
    paths.metrics_dir.mkdir()
    paths.metrics("trainer").write_text('{"step": 0}\n{"step": 1, "lo')
    Monitor(paths, "trainer", None).log(1, {"loss": 0.5})
    assert lines(paths, "trainer") == [{"step": 0}, {"step": 1, "loss": 0.5}]


def test_metrics_file_full_disk_is_one_line(tmp_path):
    monitor = Monitor(RunPaths(tmp_path), "trainer", None)
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, earlier[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write the metrics of step \d+: File too large: .*trainer\.jsonl"):
            for step in range(20):
                monitor.log(step, {"loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    monitor.close()
    monitor = Monitor(RunPaths(tmp_path), "trainer", None)
    assert all(line["loss"] == 0.5 for line in lines(RunPaths(tmp_path), "trainer"))


def test_wandb_failure_disables_it_and_the_run_continues(tmp_path, fake_wandb):
    import wandb

    run, _ = fake_wandb
    calls = []

    def fail(values):
        calls.append(values)
        raise wandb.errors.Error("the service process is gone")

    run.log = fail
    monitor = Monitor(RunPaths(tmp_path), "trainer", [WandbConfig()])
    for step in range(3):
        monitor.log(step, {"loss": 0.5})
    monitor.close()
    assert len(calls) == 1, "it is not tried again at every step"
    assert len(lines(RunPaths(tmp_path), "trainer")) == 3
    assert not run.finished


def test_wandb_close_that_hangs_times_out(tmp_path, fake_wandb):
    run, _ = fake_wandb
    stuck = threading.Event()
    run.finish = stuck.wait
    monitor = Monitor(RunPaths(tmp_path), "trainer", [WandbConfig(timeout_seconds=0.2)])
    started = time.monotonic()
    monitor.close()
    assert time.monotonic() - started < 30
    stuck.set()
