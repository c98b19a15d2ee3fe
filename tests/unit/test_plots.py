"""Metrics and figures of a custom loop in W&B, with the calls of the guide."""

import json
import os
import subprocess
import sys

import pytest

from prime_rl.plots import RLMetricsTracker

LOOP = """
import json, pathlib
from prime_rl.plots import RLMetricsTracker, log_prime_rl_metrics_to_wandb, setup_prime_rl_wandb

wandb_run = setup_prime_rl_wandb(
    project_name="my-rl-project",
    run_name="experiment-1",
    config={"custom_param": 42},
    tags=["custom", "experiment"],
    mode="offline",
)
rl_tracker = RLMetricsTracker()
for step in range(2):
    rl_tracker.log_rollout(step=step, rewards=[0.0, 1.0], sequence_lengths=[3, 9], advantages=[-1.0, 1.0])
    rl_tracker.log_gradients(step, [0.1, 0.2])
    log_prime_rl_metrics_to_wandb(
        wandb_run=wandb_run, step=step, rl_tracker=rl_tracker, create_visualizations=step == 1
    )
pathlib.Path("summary.json").write_text(json.dumps(dict(wandb_run.summary), default=str))
wandb_run.finish()
"""


@pytest.mark.extended
def test_custom_loop_writes_metrics_and_figures_to_wandb(tmp_path):
    """The program of the guide, in a process of its own as a user starts it."""
    pytest.importorskip("plotly")
    subprocess.run([sys.executable, "-c", LOOP], cwd=tmp_path, timeout=200, check=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["step"], summary["reward/mean"], summary["reward/max"], summary["seq_len/min"]) == (1, 0.5, 1, 3)
    figures = {path.name.partition("_1_")[0]: json.loads(path.read_text()) for path in tmp_path.rglob("*.plotly.json")}
    assert len(figures) == 3
    kinds = sorted(figure["data"][0]["type"] for figure in figures.values())
    assert kinds == ["heatmap"] * 3
    assert any(figure["data"][0]["z"][0][0] == -1.0 for figure in figures.values()), "log10 of the norm 0.1, as a list"


@pytest.mark.extended
def test_loop_of_the_docstring_runs(tmp_path):
    """In a process of its own too: wandb keeps the environment variables of its first use in a process."""
    import prime_rl.plots

    example = prime_rl.plots.__doc__.partition("\n\n")[2]
    block = "from prime_rl.plots import *\n" + example
    lists = "rewards, lengths, advantages = [0.0, 1.0], [3, 4], [-1.0, 1.0]\n"
    result = "import json\nprint(json.dumps(dict(run.summary), default=str))\nrun.finish()\n"
    process = subprocess.run(
        [sys.executable, "-c", lists + block + result],
        cwd=tmp_path,
        env=os.environ | {"WANDB_MODE": "offline"},
        timeout=200,
        check=True,
        capture_output=True,
        text=True,
    )
    [summary] = [line for line in process.stdout.splitlines() if line.startswith("{")]
    assert (json.loads(summary)["step"], json.loads(summary)["seq_len/max"]) == (99, 4)


def test_tracker_of_a_step_without_rollouts_raises():
    with pytest.raises(ValueError, match="step 4 has no rollouts"):
        RLMetricsTracker().log_rollout(step=4, rewards=[])
    tracker = RLMetricsTracker()
    tracker.log_rollout(0, [1.0, 2.0])
    assert tracker.metrics == {"reward/mean": 1.5, "reward/std": 0.5, "reward/min": 1.0, "reward/max": 2.0}
    assert list(tracker.figures()) == ["reward_landscape"]
