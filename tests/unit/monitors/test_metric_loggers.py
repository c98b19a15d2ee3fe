"""Metric loggers next to the file: the queue in front of each one, trackio and TensorBoard."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared.blocks import WandbConfig, WandbExtrasConfig
from prime_rl.configs.shared.monitoring import LogExtrasConfig, MetricLoggerConfig, TensorBoardConfig, TrackioConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.monitors import Monitor
from prime_rl.monitors.loggers import background_logger, metric_logger
from prime_rl.monitors.loggers.background_logger import BackgroundLogger
from prime_rl.storage.paths import RunPaths

ROWS = [{"group_id": 0, "reward": 0.5, "messages": [{"role": "user", "content": "<script>\x1b[31m"}]}]
EXTRAS = LogExtrasConfig(interval=2)


class RecordingLogger:
    """Records calls; the first one waits for `gate`."""

    name = "recorder"

    def __init__(self, gate=None):
        self.calls, self.started, self._gate = [], threading.Event(), gate

    def log(self, step, metrics):
        self.started.set()
        if self._gate is not None:
            self._gate.wait(60)
        self.calls.append((step, metrics))

    def close(self):
        self.calls.append("closed")


def test_background_logger_slow_logger_delays_nothing_and_drops_are_counted(monkeypatch, said):
    monkeypatch.setattr(background_logger, "MAX_PENDING", 3)
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


def test_background_logger_any_error_disables_it_with_one_warning(said):
    class Failing(RecordingLogger):
        def log(self, step, metrics):
            super().log(step, metrics)
            raise ValueError("no space\nmore")

    target = Failing()
    queued = BackgroundLogger(target, MetricLoggerConfig(), 1)
    for step in range(3):
        queued.log(step, {"loss": 1.0})
    queued.close()
    assert target.calls == [(0, {"loss": 1.0})]
    assert sum("recorder logging failed and is now disabled: " in line for line in said()) == 1


def test_monitor_logger_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_logger, "find_spec", lambda name: None)
    for config in (TrackioConfig(), TensorBoardConfig()):
        with pytest.raises(
            ConfigError, match=r"is not installed; add `--extra (trackio|tensorboard)` to your `uv sync`"
        ):
            Monitor(RunPaths(tmp_path), "trainer", [config])


def log_two_steps(monitor):
    for step in range(2):
        monitor.log(step, {"loss": 1.0 / (step + 1), "grad_norm": None})
        monitor.log_samples(step, ROWS)
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


def test_trackio_database_contains_scalars_and_tables(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
from pathlib import Path
from prime_rl.configs.shared.monitoring import LogExtrasConfig, TrackioConfig
from prime_rl.monitors import Monitor
from prime_rl.storage.paths import RunPaths
from tests.unit.monitors.test_metric_loggers import log_two_steps
config = TrackioConfig(project="p", name="x-trainer", group="x", log_extras=LogExtrasConfig(interval=2))
log_two_steps(Monitor(RunPaths(Path({str(tmp_path)!r})), "trainer", [config]))
import json, trackio
run, = trackio.Api().runs("p")
print("RUN " + run.name)
from trackio.sqlite_storage import SQLiteStorage
print("LOGS " + json.dumps(SQLiteStorage.get_logs("p", "x-trainer"), default=str))
"""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert "RUN x-trainer" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    logs = json.loads(line.removeprefix("LOGS "))
    assert [(row["step"], row["loss"]) for row in logs if "loss" in row] == [(0, 1.0), (1, 0.5)]
    assert [row["step"] for row in logs if "samples" in row] == [0]
    assert [row["step"] for row in logs if "distributions/reward" in row] == [0]


class FigureLogger(RecordingLogger):
    """Records figures, and ignores the rest."""

    def log(self, step, metrics):
        pass

    def log_figures(self, step, figures):
        self.calls.append((step, {name: figure["data"][0]["x"] for name, figure in figures.items()}))


def test_background_logger_draws_figures_of_all_steps_at_the_interval_and_at_the_end():
    target = FigureLogger()
    extras = WandbExtrasConfig(figures=True, figure_interval=2, samples=False, distributions=False)
    queued = BackgroundLogger(target, WandbConfig(log_extras=extras), 10)
    for step in range(4):
        queued.log(step, {"grad_norm/layer_0": 1.0, "loss": 0.5})
        queued.log_samples(step, ROWS)
    queued.close()
    names = ("viz/reward_landscape", "viz/gradient_flow")
    drawn = [(step, {name: figures[name] for name in names}) for step, figures in target.calls[:-1]]
    assert drawn == [(1, {key: [0, 1] for key in names}), (3, {key: [0, 1, 2, 3] for key in names})]
    assert target.calls[-1] == "closed"


@pytest.mark.extended
def test_wandb_offline_run_contains_figures_as_lists(tmp_path):
    pytest.importorskip("plotly")
    config = WandbConfig(offline=True, log_extras=WandbExtrasConfig(figures=True))
    monitor = Monitor(RunPaths(tmp_path), "orchestrator", [config])
    for step in range(2):
        monitor.log(step, {"reward/mean": 0.5})
        monitor.log_samples(step, [{**ROWS[0], "advantage": 0.25}])
    monitor.close()
    figures = {path.parent.name + path.name: json.loads(path.read_text()) for path in tmp_path.rglob("*.plotly.json")}
    assert len(figures) == 3
    titles = {figure["layout"]["title"]["text"]: figure["data"][0] for figure in figures.values()}
    assert set(titles) == {"Reward landscape", "Advantage distribution", "pass@k"}
    assert titles["Reward landscape"]["x"] == [0, 1] and isinstance(titles["Reward landscape"]["z"][0], list)


def test_rl_shares_loggers_and_names_their_runs():
    config = RLConfig.load(["--exp-id", "e", "--trackio.project", "p", "--tensorboard.log-extras.interval", "3"])
    trainer, orchestrator = config.trainer, config.orchestrator
    assert (trainer.trackio.name, orchestrator.trackio.name) == ("e-trainer", "e-orchestrator")
    assert {part.trackio.project for part in (trainer, orchestrator)} == {"p"}
    assert {part.trackio.group for part in (trainer, orchestrator)} == {"e"}
    assert {part.tensorboard.log_extras.interval for part in (trainer, orchestrator)} == {3}
    assert trainer.logs_distributions(3) and not trainer.logs_distributions(4)
    alone = RLConfig.load(["--orchestrator.trackio"])
    assert (alone.orchestrator.trackio.name, alone.trackio, alone.trainer.trackio) == (
        "Qwen3-0.6B-orchestrator",
        None,
        None,
    )


@pytest.mark.parametrize(("root", "argv"), [(TrainerConfig, []), (SFTConfig, []), (EvalConfig, ["--env.id", "a"])])
def test_every_command_has_the_loggers(root, argv):
    config = root.load([*argv, "--wandb.offline", "--trackio", "--tensorboard"])
    assert [type(logger).__name__ for logger in config.metric_loggers] == [
        "WandbConfig",
        "TrackioConfig",
        "TensorBoardConfig",
    ]
