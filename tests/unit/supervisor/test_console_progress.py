"""Console output of a run, from its metrics."""

import io
import json

from rich.console import Console

from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.console.console_progress import ConsoleProgress


def test_console_progress_batches_without_learning_signal_warn_once(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    display = ConsoleProgress(paths, 10, Console(file=out, width=200))
    paths.metrics("orchestrator").parent.mkdir(parents=True)
    lines = [{"step": step, "batch/zero_advantage_groups": 1.0, "reward/mean": 0.0} for step in range(5)]
    for line in lines:
        with paths.metrics("orchestrator").open("a") as file:
            file.write(json.dumps(line) + "\n")
        display.refresh()
    assert out.getvalue().count("warning: all advantages of batches 0 to 2 are 0") == 1


def test_console_progress_shows_new_warnings_and_none_of_an_earlier_process(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    paths.warnings.parent.mkdir(parents=True)
    paths.warnings.write_text(json.dumps({"text": "of the process before"}) + "\n")
    display = ConsoleProgress(paths, 10, Console(file=out, width=20))
    display.refresh()
    with paths.warnings.open("a") as file:
        file.write(json.dumps({"text": "environment [red]: group 0 failed: NameError: name 'x' is not defined"}) + "\n")
    display.refresh()
    display.refresh()
    assert out.getvalue() == "warning: environment [red]: group 0 failed: NameError: name 'x' is not defined\n"


def test_console_progress_shows_a_resumed_run_from_its_first_new_step(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    paths.metrics_dir.mkdir()

    def write(rewards):
        for role in ("orchestrator", "trainer"):
            new = tmp_path / role
            new.write_text("".join(json.dumps({"step": n, "reward/mean": r}) + "\n" for n, r in enumerate(rewards)))
            new.rename(paths.metrics(role))

    write([0.1, 0.2, 0.3])
    display = ConsoleProgress(paths, 3, Console(file=out, width=200))
    display.refresh()
    write([0.1, 0.2])  # the rollback to checkpoint 2
    display.refresh()
    assert (out.getvalue(), display.has_new_steps) == ("", False)
    write([0.1, 0.2, 0.9])
    display.refresh()
    assert display.has_new_steps
    first, second = out.getvalue().splitlines()
    assert first == "resumed after step 2"
    assert "step 3/3 | reward 0.9 " in second and "ETA" not in second
    assert display.progress.rewards == [0.1, 0.2, 0.9]


def test_console_progress_skips_lines_of_evaluations(tmp_path):
    paths, out = RunPaths(tmp_path), io.StringIO()
    display = ConsoleProgress(paths, 10, Console(file=out, width=200))
    paths.metrics("orchestrator").parent.mkdir(parents=True)
    shipped = [{"step": 0, "reward/mean": 0.25, "staleness/max": 0.0}, {"step": 0, "eval/words/reward/mean": 0.75}]
    paths.metrics("orchestrator").write_text("".join(json.dumps(line) + "\n" for line in shipped))
    paths.metrics("trainer").write_text(json.dumps({"step": 0, "loss": 0.5}) + "\n")
    display.refresh()
    assert "step 1/10 | reward 0.25 " in out.getvalue()
