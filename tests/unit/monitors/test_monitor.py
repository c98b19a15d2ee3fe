"""Metrics on disk, W&B in offline mode and with a fake, trackio, TensorBoard, and the queue in front of each one."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.monitoring import (
    LogExtrasConfig,
    MetricLoggerConfig,
    MLflowConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
    WandbExtrasConfig,
)
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.monitors import Monitor
from prime_rl.monitors.loggers import metric_logger
from prime_rl.monitors.loggers.metric_logger import BackgroundLogger
from prime_rl.monitors.loggers.wandb_logger import PRIME_NAMES
from prime_rl.monitors.metric_table import METRIC_TABLES
from prime_rl.storage.file_locks import acquire_lock
from prime_rl.storage.paths import RunPaths
from tests.support.command import until

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
    monkeypatch.setattr(wandb, "init", lambda **settings: calls.append(settings) or run)
    return run, calls


def lines(paths, role):
    """Return the lines of a file of metrics, without their time."""
    found = [json.loads(line) for line in paths.metrics(role).read_text().splitlines()]
    assert all(isinstance(line.pop("time", 0.0), float) for line in found)
    return found


def test_monitor_log_writes_one_object_per_step(tmp_path):
    paths, before = RunPaths(tmp_path), time.time()
    monitor = Monitor(paths, "trainer", None)
    monitor.log(0, {"loss": np.float32(0.5), "tokens": np.int64(7), "lr": 1.0, "optim/skipped": True})
    first = json.loads(paths.metrics("trainer").read_text())
    assert before <= first["time"] <= time.time()
    assert lines(paths, "trainer") == [{"step": 0, "loss": 0.5, "tokens": 7, "lr": 1.0, "optim/skipped": 1}]
    assert isinstance(first["tokens"], int)
    monitor.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "mismatch_kl/on_policy": None})
    monitor.log_samples(1, ROWS)
    monitor.log_distributions(1, {"reward": [1.0]})
    monitor.close()
    assert lines(paths, "trainer")[1] == {"step": 1, "loss": None, "grad_norm": None, "mismatch_kl/on_policy": None}
    with paths.metrics("trainer").open("a") as file:
        file.write('{"step": 2, "lo')  # the process was killed
    Monitor(paths, "trainer", None).log(2, {})
    assert [line["step"] for line in lines(paths, "trainer")] == [0, 1, 2]


def test_wandb_run_is_started_as_configured(tmp_path, fake_wandb):
    run, calls = fake_wandb
    rl = RLConfig.load(["--wandb.name", "x", "--wandb.project", "p", "--wandb.offline", "--wandb.id", "abc"])
    Monitor(RunPaths(tmp_path), "trainer", [rl.trainer.wandb], rl.trainer).close()
    Monitor(RunPaths(tmp_path), "orchestrator", [rl.orchestrator.wandb]).close()
    assert [(call["name"], call["id"], call["resume"]) for call in calls] == [
        ("x-trainer", "abc", "allow"), ("x-orchestrator", None, None),
    ]  # fmt: skip
    assert {(call["project"], call["mode"], call["group"]) for call in calls} == {("p", "offline", "x")}
    assert (calls[0]["config"]["optim"]["lr"], calls[0]["dir"]) == (TrainerConfig().optim.lr, tmp_path)
    assert run.finished


def test_wandb_resumed_process_continues_its_own_run(tmp_path, fake_wandb):
    _, calls = fake_wandb
    new, resumed = (RLConfig.load(["--wandb.offline", *keys]) for keys in ([], ["--ckpt.resume-step", "-1"]))
    for rl in (new, resumed, new):
        Monitor(RunPaths(tmp_path), "trainer", [rl.trainer.wandb], rl.trainer).close()
    Monitor(RunPaths(tmp_path), "orchestrator", [resumed.orchestrator.wandb], resumed.orchestrator).close()
    none = (None, None)
    assert [(call["id"], call["resume"]) for call in calls] == [none, (FakeRun.id, "allow"), none, none]


def test_wandb_metric_aliases_are_logged_beside_their_metrics(tmp_path, fake_wandb):
    names = {"rollout/mean_reward": "reward/mean", "mine": "lr"}
    monitor = Monitor(RunPaths(tmp_path), "orchestrator", [WandbConfig(metric_aliases=names)])
    monitor.log(0, {"reward/mean": 0.5})
    monitor.close()
    (logged,) = fake_wandb[0].logged
    assert logged == {"step": 0, "reward/mean": 0.5, "rollout/mean_reward": 0.5}


def test_wandb_prime_names_have_the_value_and_the_step_of_ours(tmp_path, fake_wandb):
    run, _ = fake_wandb
    config = RLConfig.load(["--wandb", "--wandb.names", "prime", "--orchestrator.val"])
    steps = {
        "trainer": [{"loss": 0.5, "entropy": 2.0, "time/synchronize": 0.25}],
        "orchestrator": [
            {"reward/mean": 0.25, "reward/max": 1.0, "time/step": 9.0, "seq_len/mean": 12.0, "advantage/std": 0.5},
            {"val/a/pass@2": 0.5, "val/b/pass@2": 1.0, "val/a/by/answer/A/pass@2": 0.0, "eval/c/pass@2": 0.0,
             "val/a/metrics/categorical_accuracy": 0.75, "val/a/pass@2/ci95_low": 0.1},
        ],
    }  # fmt: skip
    for role, rows in steps.items():
        block = getattr(config, role)
        monitor = Monitor(RunPaths(tmp_path), role, [block.wandb], block)
        for row in rows:
            monitor.log(7, row)
        monitor.close()
    policy, rollout, evaluation = run.logged
    assert {row["step"] for row in run.logged} == {7}
    assert (policy["policy/loss"], policy["policy/entropy"], policy["train/sync_time"]) == (0.5, 2.0, 0.25)
    assert (rollout["rollout/mean_reward"], rollout["rollout/max_reward"], rollout["reward/mean"]) == (0.25, 1.0, 0.25)
    assert (rollout["rollout/mean_sequence_length"], rollout["advantages/std"]) == (12.0, 0.5)
    assert "train/step_time" not in rollout, "the orchestrator's step is not the guide's training step"
    added = {name: value for name, value in evaluation.items() if name not in steps["orchestrator"][1]}
    assert added == {"step": 7, "eval/pass@2": 0.75, "eval/categorical_accuracy": 0.75}
    assert not set(PRIME_NAMES) & set(json.loads((tmp_path / "metrics/trainer.jsonl").read_text()))
    tables = [METRIC_TABLES["trainer"], METRIC_TABLES["orchestrator"]]
    assert all(any(table.find(ours) for table in tables) for ours in PRIME_NAMES.values())


def test_wandb_tables_follow_interval_and_configuration(tmp_path, fake_wandb):
    run, _ = fake_wandb

    def log(extras, role="orchestrator"):
        run.logged.clear()
        monitor = Monitor(RunPaths(tmp_path), role, [WandbConfig(log_extras=extras)])
        for step in range(4):
            if role == "orchestrator":
                monitor.log(step, {"reward/mean": 1.0, "reward/std": None})
            monitor.log_samples(step, ROWS)
            monitor.log_distributions(step, {"reward": np.array([[0.0, 1.0], [2.0, np.nan]]), "empty": []})
        monitor.close()
        return [*run.logged]

    def steps_with(name, logged):
        return [values["step"] for values in logged if name in values]

    assert log(None) == [{"step": step, "reward/mean": 1.0} for step in range(4)]
    logged = log(WandbExtrasConfig(interval=2))
    assert steps_with("samples", logged) == steps_with("distributions", logged) == [0, 2]
    samples = next(values["samples"] for values in logged if "samples" in values)
    assert samples.columns == ["step", "group_id", "reward", "messages"]
    assert samples.data[0] == [0, 0, 0.5, '[{"role": "user", "content": "a"}]']
    spread = [values for values in logged if "distributions" in values]
    ((step, name, count, mean, low, *_, high),) = spread[1]["distributions"].data
    assert (step, name, count, mean, low, high) == (2, "reward", 3, 1.0, 0.0, 2.0)
    assert "distributions/reward" in spread[0]
    assert steps_with("distributions", log(WandbExtrasConfig(distributions=False, interval=1))) == []
    assert steps_with("samples", log(WandbExtrasConfig(samples=False, interval=1))) == []
    logged = log(WandbExtrasConfig(interval=10), "eval")
    assert steps_with("samples", logged) == [0, 1, 2, 3], "each evaluation"


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

    monkeypatch.setattr(wandb, "init", Mock(side_effect=getattr(wandb.errors, kind)(refusal)))
    with pytest.raises(ConfigError, match="wandb login") as caught:
        Monitor(RunPaths(tmp_path), "trainer", [WandbConfig()])
    assert "more" not in str(caught.value)


@pytest.mark.extended
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


@pytest.mark.extended
def test_wandb_offline_run_is_written(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", "k-51c0ffee")
    config = WandbConfig(offline=True, name="x-o", log_extras=WandbExtrasConfig(interval=1, figures=True))
    monitor = Monitor(RunPaths(tmp_path), "orchestrator", [config], RLConfig())
    for step in range(2):
        monitor.log(step, {"reward/mean": 0.5})
        monitor.log_samples(step, [{**row, "advantage": 0.25} for row in ROWS])
        monitor.log_distributions(step, {"reward": [0.0, 1.0]})
    monitor.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in run.rglob("*.table.json")}
    assert tables["samples"]["data"][1][2] == 1.0
    assert tables["distributions"]["data"][0][1] == "reward"
    figures = [json.loads(path.read_text()) for path in run.rglob("*.plotly.json")]
    titles = {figure["layout"]["title"]["text"]: figure["data"][0] for figure in figures}
    assert {"Reward landscape", "Advantage distribution", "pass@k"} <= set(titles)
    assert isinstance(titles["Reward landscape"]["z"][0], list)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"api_key_var" in content for content in written), "the configuration is there"
    assert not any(b"k-51c0ffee" in content for content in written), "and the key is not"


@pytest.mark.extended
def test_wandb_runs_of_one_process_are_separate(tmp_path, monkeypatch):
    """One trainer of several runs: each has its own W&B run, also after another one has ended."""
    import wandb

    monkeypatch.setenv("WANDB_CONSOLE", "off")  # W&B prints the summary of each run
    wandb.teardown()  # an earlier test's session would keep its own settings
    metrics = {"alpha": "mismatch_kl", "beta": "grad_norm"}
    monitors = {
        name: Monitor(RunPaths(tmp_path / f"run_{name}"), "trainer", [WandbConfig(offline=True, name=name)])
        for name in metrics
    }
    for name, metric in metrics.items():
        monitors[name].log(0, {metric: 1.0})
        monitors[name].close()
    for name, metric in metrics.items():
        (file,) = (tmp_path / f"run_{name}" / "wandb").glob("offline-run-*/*.wandb")
        until(lambda file=file, metric=metric: metric.encode() in file.read_bytes(), "W&B's process", 30)
        (other,) = set(metrics.values()) - {metric}
        assert other.encode() not in file.read_bytes()


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


def test_wandb_failure_disables_it_with_one_warning_and_the_run_continues(tmp_path, fake_wandb, said):
    run, _ = fake_wandb
    run.log = Mock(side_effect=ValueError("the service process is gone\nmore"))
    monitor = Monitor(RunPaths(tmp_path), "trainer", [WandbConfig()])
    for step in range(3):
        monitor.log(step, {"loss": 0.5})
    monitor.close()
    assert run.log.call_count == 1, "it is not tried again at every step"
    assert len(lines(RunPaths(tmp_path), "trainer")) == 3
    assert not run.finished
    assert sum("W&B logging failed and is now disabled: " in line for line in said()) == 1
    assert any("lacks 3 of 3 calls; metrics/*.jsonl has all values" in line for line in said())


def test_wandb_close_that_hangs_times_out(tmp_path, fake_wandb):
    stuck, started = threading.Event(), time.monotonic()
    fake_wandb[0].finish = stuck.wait
    Monitor(RunPaths(tmp_path), "trainer", [WandbConfig(timeout_seconds=0.1)]).close()
    assert time.monotonic() - started < 30
    stuck.set()


UNTRUSTED_ROWS = [{"group_id": 0, "reward": 0.5, "messages": [{"role": "user", "content": "<script>\x1b[31m"}]}]
EXTRAS = LogExtrasConfig(interval=2)


class RecordingLogger:
    """Records calls, and the steps that figures show; the first call waits for `gate`."""

    name = "recorder"

    def __init__(self, gate=None):
        self.calls, self.figures, self.started, self._gate = [], [], threading.Event(), gate

    def log(self, step, metrics):
        self.started.set()
        if self._gate is not None:
            self._gate.wait(60)
        self.calls.append((step, metrics))

    def log_figures(self, step, figures):
        self.figures.append((step, {name: figure["data"][0]["x"] for name, figure in figures.items()}))

    def close(self):
        self.calls.append("closed")


def test_background_logger_slow_logger_delays_nothing_and_drops_are_counted(monkeypatch, said):
    monkeypatch.setattr(metric_logger, "MAX_PENDING", 3)
    gate = threading.Event()
    target = RecordingLogger(gate)
    queued = BackgroundLogger(target, MetricLoggerConfig(), 1)
    queued.log(0, {"loss": 1.0})
    assert target.started.wait(60)
    for step in range(1, 9):
        queued.log(step, {"loss": 1.0, "entropy": None})  # returns although the logger hangs
    gate.set()
    queued.close()
    assert target.calls == [*((step, {"loss": 1.0}) for step in range(4)), "closed"]
    assert sum("recorder is too slow" in line for line in said()) == 1
    assert any("recorder was too slow: 5 calls were dropped" in line for line in said())


@pytest.mark.parametrize("config", [TrackioConfig(), TensorBoardConfig(), MLflowConfig()])
def test_monitor_logger_that_is_not_installed_is_one_line(tmp_path, monkeypatch, config):
    monkeypatch.setattr(metric_logger, "find_spec", lambda name: None)
    message = r"is not installed; add `--extra (trackio|tensorboard|mlflow)` to your `uv sync`"
    with pytest.raises(ConfigError, match=message):
        Monitor(RunPaths(tmp_path), "trainer", [config])


def log_two_steps(monitor):
    for step in range(2):
        monitor.log(step, {"loss": 1.0 / (step + 1), "grad_norm": None})
        monitor.log_samples(step, UNTRUSTED_ROWS)
        monitor.log_distributions(step, {"reward": [0.0, 1.0, np.nan]})
    monitor.close()


def test_tensorboard_event_file_contains_scalars_and_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_two_steps(Monitor(RunPaths(tmp_path), "trainer", [TensorBoardConfig(log_extras=EXTRAS)]))
    events = EventAccumulator(str(tmp_path / "tensorboard/trainer")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 0.5)]
    assert events.Tags()["scalars"] == ["loss"]
    (histogram,) = events.Histograms("distributions/reward")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (0, 2, 1.0)


@pytest.mark.extended
def test_trackio_database_contains_scalars_and_tables(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
import json
from pathlib import Path
from prime_rl.configs.monitoring import LogExtrasConfig, TrackioConfig
from prime_rl.monitors import Monitor
from prime_rl.storage.paths import RunPaths
from tests.unit.monitors.test_monitor import log_two_steps
config = TrackioConfig(project="p", name="x-trainer", group="x", log_extras=LogExtrasConfig(interval=2))
log_two_steps(Monitor(RunPaths(Path({str(tmp_path)!r})), "trainer", [config]))
from trackio.sqlite_storage import SQLiteStorage
print("LOGS " + json.dumps(SQLiteStorage.get_logs("p", "x-trainer"), default=str))
"""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    logs = json.loads(line.removeprefix("LOGS "))
    assert [(row["step"], row["loss"]) for row in logs if "loss" in row] == [(0, 1.0), (1, 0.5)]
    assert [row["step"] for row in logs if "samples" in row] == [0]
    assert [row["step"] for row in logs if "distributions/reward" in row] == [0]


@pytest.mark.extended
def test_mlflow_database_contains_scalars_parameters_and_samples_and_continues(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    keys = ["--mlflow.experiment", "e", "--mlflow.name", "x", "--mlflow.log-extras.interval", "2"]
    for resumed in ([], ["--ckpt.resume-step", "-1"]):
        rl = RLConfig.load([*keys, *resumed])
        log_two_steps(Monitor(RunPaths(tmp_path), "trainer", [rl.trainer.mlflow], rl.trainer))
    evaluation = Monitor(RunPaths(tmp_path), "eval", [MLflowConfig(experiment="e", name="eval")])
    evaluation.log(3, {"eval/a/pass@2": 0.5, "eval/a/pass^2": 0.25})
    evaluation.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("e")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    trainer, other = runs["x-trainer"], runs["eval"]
    assert (trainer.info.status, trainer.data.tags["group"]) == ("FINISHED", "x")
    assert trainer.data.params["optim.lr"] == "1e-06"
    history = client.get_metric_history(trainer.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(0, 1.0), (0, 1.0), (1, 0.5), (1, 0.5)]
    assert other.data.metrics == {"eval/a/pass_at_2": 0.5, "eval/a/pass_all_2": 0.25}
    (samples,) = tmp_path.rglob("samples/step_0.jsonl")
    assert [json.loads(line) for line in samples.read_text().splitlines()] == UNTRUSTED_ROWS


def test_mlflow_that_cannot_be_reached_or_refuses_is_stated(tmp_path, monkeypatch, said):
    pytest.importorskip("mlflow")
    paths = RunPaths(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:k-51c0ffee@127.0.0.1:9")
    monitor = Monitor(paths, "trainer", [MLflowConfig(timeout_seconds=4)])
    monitor.log(0, {"loss": 0.5})
    monitor.close()
    assert lines(paths, "trainer") == [{"step": 0, "loss": 0.5}]
    (line,) = [line for line in said() if "MLflow" in line]
    assert "MLflow cannot be reached" in line and "this trainer logs nothing there" in line
    assert "51c0ffee" not in "".join(said()) + paths.warnings.read_text()
    assert "MLflow cannot be reached" in json.loads(paths.warnings.read_text())["text"], "the console shows this file"
    with pytest.raises(ConfigError, match=r"mlflow: .*nonsense") as caught:
        Monitor(paths, "trainer", [MLflowConfig(tracking_uri="nonsense://x")])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"contains a URL with a user or password"):
        RLConfig.load(["--mlflow.tracking-uri", "https://user:k-51c0ffee@host"])


@pytest.mark.extended
def test_mlflow_without_its_driver_artifacts_lock_or_earlier_run(tmp_path, monkeypatch, said):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    paths = RunPaths(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'psycopg\w*'\); install it"):
        Monitor(paths, "trainer", [MLflowConfig(tracking_uri="postgresql://h/db")])

    uri = f"sqlite:///{tmp_path}/other.db"
    (tmp_path / "file").touch()
    MlflowClient(tracking_uri=uri).create_experiment("prime-rl", f"file://{tmp_path}/file/artifacts")
    (tmp_path / "mlflow/trainer.id").write_text("0" * 32)
    rl = RLConfig.load(["--mlflow.tracking-uri", uri, "--mlflow.log-extras.interval", "1", "--ckpt.resume-step", "-1"])
    log_two_steps(Monitor(paths, "trainer", [rl.trainer.mlflow], rl.trainer))
    run = MlflowClient(tracking_uri=uri).get_run((tmp_path / "mlflow/trainer.id").read_text())
    assert run.data.metrics["loss"] == 0.5
    for words in ("MLflow has no run 000", "MLflow cannot store files"):
        assert sum(words in line for line in said()) == 1

    with (tmp_path / "mlflow/lock").open("a+") as lock:
        acquire_lock(lock, 1, "")
        Monitor(paths, "trainer", [MLflowConfig(timeout_seconds=0.2)]).close()
    assert any("MLflow cannot be started: " in line for line in said())


def test_background_logger_draws_figures_of_all_steps_at_the_interval_and_at_the_end():
    target = RecordingLogger()
    extras = WandbExtrasConfig(figures=True, figure_interval=2, samples=False, distributions=False)
    queued = BackgroundLogger(target, WandbConfig(log_extras=extras), 10)
    for step in range(4):
        queued.log(step, {"grad_norm/layer_0": 1.0, "loss": 0.5})
        queued.log_samples(step, UNTRUSTED_ROWS)
    queued.close()
    names = ("viz/reward_landscape", "viz/gradient_flow")
    drawn = [(step, {name: figures[name] for name in names}) for step, figures in target.figures]
    assert drawn == [(1, {key: [0, 1] for key in names}), (3, {key: [0, 1, 2, 3] for key in names})]
    assert target.calls[-1] == "closed"


def test_rl_shares_loggers_and_names_their_runs():
    config = RLConfig.load(["--exp-id", "e", "--trackio.project", "p", "--tensorboard.log-extras.interval", "3"])
    both = (config.trainer, config.orchestrator)
    assert [part.trackio.name for part in both] == ["e-trainer", "e-orchestrator"]
    assert {(part.trackio.project, part.trackio.group) for part in both} == {("p", "e")}
    assert {part.tensorboard.log_extras.interval for part in both} == {3}
    assert config.trainer.logs_distributions(3) and not config.trainer.logs_distributions(4)
    alone = RLConfig.load(["--orchestrator.trackio"])
    assert alone.orchestrator.trackio.name == "Qwen3-0.6B-orchestrator"
    assert alone.trackio is alone.trainer.trackio is None
    every = ["--wandb.offline", "--trackio", "--tensorboard", "--mlflow"]
    for root, argv in ((TrainerConfig, every), (SFTConfig, every), (EvalConfig, ["--env.id", "a", *every])):
        names = [type(logger).__name__ for logger in root.load(argv).metric_loggers]
        assert names == ["WandbConfig", "TrackioConfig", "TensorBoardConfig", "MLflowConfig"]


@pytest.mark.extended
def test_mlflow_databases_of_two_processes_that_start_together_are_one(tmp_path):
    pytest.importorskip("mlflow")
    code = (
        "import sys; from pathlib import Path; from prime_rl.configs.monitoring import MLflowConfig\n"
        "from prime_rl.monitors import Monitor; from prime_rl.storage.paths import RunPaths\n"
        "sys.stdin.readline(); Monitor(RunPaths(Path(sys.argv[1])), sys.argv[2], [MLflowConfig()]).close()"
    )
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    roles = ("trainer", "orchestrator")
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), role], **pipes) for role in roles]
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 0, error
        assert "cannot be" not in error
