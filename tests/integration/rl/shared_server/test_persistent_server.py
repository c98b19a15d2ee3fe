"""One standalone server for several runs, one after the other: no run affects the next one."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.checkpoint_artifacts import read_resume
from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, of_server, rl_values, write_toml
from tests.integration.rl.test_whole_run import manifest
from tests.support.command import (
    END_TIMEOUT_SECONDS,
    PROGRESS_TIMEOUT_SECONDS,
    alive,
    clean_environment,
    executable,
    metrics_of,
    until,
)
from tests.support.server import Server

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

HALF, STEPS = 2, 4
PROMPT = [1, 4, 6, 90, 91, 86, 85, 76, 2, 6, 1, 5, 6]  # "stone", in the model's chat template


@pytest.fixture(scope="module")
def base(server: Server) -> tuple[Any, ...]:
    """The state of the server before the runs of this file."""
    until(lambda: server.policy()["run_id"] is None, "the end of the lease")
    server.reload()
    return identity(server)


def identity(server: Server) -> tuple[Any, ...]:
    """The loaded policy, and its completion of a prompt."""
    loaded, choice = server.policy(), server.generate(PROMPT)
    return loaded["branch"], loaded["step"], loaded["hash"], choice["token_ids"]


def with_server(server: Server, output_dir: Path, ranks: int, **values: Any) -> dict[str, Any]:
    """The configuration of a run that uses `server`."""
    orchestrator = {**ORCHESTRATOR, "client": of_server(server)}
    return rl_values(output_dir, orchestrator=orchestrator, trainer_ranks=ranks, **values)


def assert_bound_kept(paths: RunPaths, async_level: int) -> None:
    """Batch 0 is the base model's, as the trainer's own log-probabilities of it prove; none later is too old."""
    shipped, trained = metrics_of(paths, "orchestrator"), metrics_of(paths, "trainer")
    assert (manifest(paths, 0)["min_version"], manifest(paths, 0)["max_version"]) == (0, 0)
    assert trained[0]["mismatch_kl/on_policy"] < 1e-4
    for step, line in enumerate(shipped):
        assert line["step"] == step
        assert line["staleness/max"] == step - manifest(paths, step)["min_version"] <= async_level
        assert line["tokens/unaccounted"] == 0


def assert_serves(server: Server, paths: RunPaths, step: int) -> None:
    """The server samples from the version of the last step, and no run holds it."""
    loaded = server.policy()
    assert (loaded["run_id"], loaded["step"]) == (None, step)
    assert loaded["hash"] == read_manifest(paths.weights(step), WEIGHTS_FORMAT)["hash"]


@pytest.fixture
def free_server(server: Server, base: tuple[Any, ...]) -> Server:
    """The server without a lease: that of a killed run must expire first."""
    until(lambda: server.policy()["run_id"] is None, "the end of the lease")
    return server


def test_second_run_starts_at_the_base_model(
    free_server: Server, base: tuple[Any, ...], start: StartCommand, tmp_path: Path
) -> None:
    """The first run trains on two ranks and leaves its last version; the second one starts at the base model."""
    for name, async_level, ranks in (("first", 2, 2), ("second", 1, 1)):
        values = with_server(free_server, tmp_path / name, ranks, async_level=async_level, max_steps=STEPS)
        run = start("rl", values, tmp_path / name)
        run.until_step("orchestrator", 0)
        run.until(lambda run=run, ranks=ranks: len(run.ranks()) == ranks, "all ranks")  # type: ignore[misc]
        assert run.end() == 0, run.story()
        assert_bound_kept(run.paths, async_level)
        assert [line["step"] for line in metrics_of(run.paths, "trainer")] == list(range(STEPS))
        assert max(line["staleness/max"] for line in metrics_of(run.paths, "orchestrator")) > 0, (
            "no batch was off-policy"
        )
        assert_serves(free_server, run.paths, STEPS)
        assert identity(free_server)[2:] != base[2:], "the run changed the policy"
    free_server.reload()
    assert identity(free_server) == base


def test_bench_runs_inference_and_trainer_separately(
    free_server: Server, base: tuple[Any, ...], start: StartCommand, tmp_path: Path
) -> None:
    """Inference and the trainer run one after the other; the server is unchanged afterwards."""
    values = with_server(free_server, tmp_path / "run", 1, async_level=1, max_steps=500, bench=True)
    run = start("rl", values, tmp_path / "run")
    assert run.end() == 0, run.story()
    figures = json.loads((tmp_path / "run/bench/bench.json").read_text())
    assert figures["orchestrator"]["perf/rollouts_per_second"]["max"] > 0
    assert figures["trainer"]["tokens"]["mean"] == ORCHESTRATOR["batch_size"] * 64
    sampled, trained = (metrics_of(RunPaths(tmp_path / "run/bench"), role) for role in ("orchestrator", "trainer"))
    assert len(sampled) == len(trained) == 4
    assert identity(free_server) == base


@contextmanager
def shell(command: list[str], output: Path) -> Iterator[tuple[psutil.Process, Callable[[], None]]]:
    """Start a command in the background of a shell; yields its process and a function that closes the shell."""
    line = f"{shlex.join(command)} >{shlex.quote(str(output))} 2>&1 & echo $!; read _"
    with subprocess.Popen(
        ["sh", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
    ) as terminal:
        assert terminal.stdin is not None and terminal.stdout is not None
        process = psutil.Process(int(terminal.stdout.readline()))
        try:
            yield process, terminal.stdin.close
        finally:
            if alive(process):
                process.kill()


def test_standalone_commands_in_three_shells_complete(
    free_server: Server, base: tuple[Any, ...], start: StartCommand, tmp_path: Path
) -> None:
    """Standalone commands; the orchestrator continues after the shell that started it is closed."""
    paths = RunPaths(tmp_path / "run")
    shared = {"output_dir": str(paths.root), "model": {"name": str(MODEL)}, "async_level": 1, "max_steps": STEPS}
    orchestrator = {**shared, **ORCHESTRATOR, "seq_len": 64, "client": of_server(free_server)}
    file = write_toml(tmp_path / "orchestrator.toml", orchestrator)
    with shell([executable("orchestrator"), "@", str(file)], tmp_path / "orchestrator.out") as (process, close):
        until(lambda: paths.rollouts(1).exists() or not alive(process), "batch 1")
        assert free_server.policy()["run_id"] is not None
        assert identity(free_server) == base, "no trainer has changed it yet"
        close()
        trainer = start("trainer", {**shared, "model": {**shared["model"], "seq_len": 64}}, paths.root)
        until(lambda: trainer.process.poll() is not None or not alive(process), "the end of either")
        assert process.wait(PROGRESS_TIMEOUT_SECONDS) == 0, (tmp_path / "orchestrator.out").read_text()
        assert trainer.end() == 0, trainer.story()
    assert_bound_kept(paths, 1)
    assert [line["step"] for line in metrics_of(paths, "trainer")] == list(range(STEPS))
    assert_serves(free_server, paths, STEPS)


@pytest.mark.parametrize("victim", ["trainer", "orchestrator"])
def test_run_with_a_killed_process_ends_and_names_it(
    free_server: Server, start: StartCommand, tmp_path: Path, victim: str
) -> None:
    run = start("rl", with_server(free_server, tmp_path / "run", ranks=2), tmp_path / "run")
    run.until_step("trainer", 1)
    assert_bound_kept(run.paths, 2)
    killed = run.role("orchestrator") if victim == "orchestrator" else run.ranks()[1]
    os.kill(killed.pid, signal.SIGKILL)
    assert run.end(END_TIMEOUT_SECONDS) == 1, run.story()
    [error] = run.errors.splitlines()
    by_whom = f"exited with code 1: rank 1 (pid {killed.pid}) was killed by SIGKILL, perhaps out of memory"
    assert error.startswith(f"error: {victim} {'was killed by SIGKILL' if victim == 'orchestrator' else by_whom}")
    assert "out of memory" in error
    assert str(run.paths.log(victim)) in error
    assert free_server.policy()["step"] >= 0, "the standalone server continues"


def test_resumed_run_continues_where_the_first_ended(free_server: Server, start: StartCommand, tmp_path: Path) -> None:
    """At k = 0, as branch 1; tests/unit/orchestrator compares the batches with those of one run."""
    values = {"orchestrator": {**ORCHESTRATOR, "client": of_server(free_server)}, "async_level": 0}
    split = RunPaths(tmp_path / "run")
    for steps, ckpt in ((HALF, {"interval": 50}), (STEPS, {"resume_step": HALF})):
        run = start("rl", rl_values(split.root, max_steps=steps, ckpt=ckpt, **values), split.root)
        assert run.end() == 0, run.story()
        assert free_server.policy()["step"] == steps
        free_server.reload()
    groups = [group for step in range(STEPS) for group in manifest(split, step)["group_ids"]]
    assert groups == list(range(STEPS * 4)), "at k = 0 batches are shipped in the order of the stream"
    assert [manifest(split, step)["branch"] for step in range(STEPS)] == [0] * HALF + [1] * (STEPS - HALF)
    resume = read_resume(split.checkpoints_dir)
    assert resume is not None and (resume.step, resume.branch) == (HALF, 1)
    for role in ("trainer", "orchestrator"):
        assert [line["step"] for line in metrics_of(split, role)] == list(range(STEPS))
    for line in metrics_of(split, "trainer"):
        assert line["mismatch_kl/on_policy"] < 1e-4, "inference samples from what the trainer resumed"
