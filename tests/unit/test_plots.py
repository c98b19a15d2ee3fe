"""Metrics and figures of a custom loop in W&B, with the calls of the guide."""

import json
import os
import subprocess
import sys

import pytest

import prime_rl.plots
from prime_rl.plots import RLMetricsTracker

LISTS = "rewards, lengths, advantages = [0.0, 1.0], [3, 4], [-1.0, 1.0]\n"
LOOPS = {
    "guide": """
from prime_rl.plots import RLMetricsTracker, log_prime_rl_metrics_to_wandb, setup_prime_rl_wandb
run = setup_prime_rl_wandb(
    project_name="my-rl-project",
    run_name="experiment-1",
    config={"custom_param": 42},
    tags=["custom", "experiment"],
    mode="offline",
)
rl_tracker = RLMetricsTracker()
for step in range(100):
    rl_tracker.log_rollout(step=step, rewards=rewards, sequence_lengths=lengths, advantages=advantages)
    rl_tracker.log_gradients(step, [0.1, 0.2])
    log_prime_rl_metrics_to_wandb(wandb_run=run, step=step, rl_tracker=rl_tracker, create_visualizations=step == 99)
""",
    "docstring": "from prime_rl.plots import *\n" + (prime_rl.plots.__doc__ or "").partition("\n\n")[2],
}
FINISH = "\nimport json\nprint(json.dumps(dict(run.summary), default=str))\nrun.finish()\n"


@pytest.mark.extended
@pytest.mark.parametrize("loop", LOOPS)
def test_custom_loop_writes_metrics_and_figures_to_wandb(loop, tmp_path):
    """In a process of its own: wandb keeps the environment variables of its first use in a process."""
    pytest.importorskip("plotly")
    environment = os.environ | {"WANDB_MODE": "offline"}
    command = [sys.executable, "-c", LISTS + LOOPS[loop] + FINISH]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=200, check=True, capture_output=True, text=True
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    summary = json.loads(line)
    assert (summary["step"], summary["reward/mean"], summary["seq_len/max"]) == (99, 0.5, 4)
    if loop == "guide":
        figures = [json.loads(path.read_text()) for path in tmp_path.rglob("*.plotly.json")]
        assert [figure["data"][0]["type"] for figure in figures] == ["heatmap"] * 3
        assert any(figure["data"][0]["z"][0][0] == -1.0 for figure in figures), "log10 of the norm 0.1, as a list"


def test_tracker_of_a_step_without_rollouts_raises():
    with pytest.raises(ValueError, match="step 4 has no rollouts"):
        RLMetricsTracker().log_rollout(step=4, rewards=[])
    tracker = RLMetricsTracker()
    tracker.log_rollout(0, [1.0, 2.0])
    assert tracker.metrics == {"reward/mean": 1.5, "reward/std": 0.5, "reward/min": 1.0, "reward/max": 2.0}
    assert list(tracker.figures()) == ["reward_landscape"]
