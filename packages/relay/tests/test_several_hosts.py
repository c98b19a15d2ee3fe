"""Five hosts with their own network, connected by relays only: two of inference, two of the trainer, the orchestrator.

The hosts are namespaces. All processes are real, with the model of the CPU recipe and small batches.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.several_hosts import parse, run
from tests.support import network_hosts

from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.paths import RunPaths, steps_in

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 60
RunHosts = Callable[..., dict[str, Any]]


@pytest.fixture
def run_hosts(tmp_path: Path) -> RunHosts:
    """Run the recipe on five hosts with these options of benchmarks/several_hosts.py."""
    if reason := network_hosts.missing():
        pytest.skip(f"network namespaces cannot be used: {reason}")
    common = ("--delta", "--batch-size", "128", "--timeout", "800", "--at", "3")
    return lambda *options: run(tmp_path, parse([*common, *options]))


def test_run_without_a_shared_directory_survives_the_loss_of_a_server_network(
    run_hosts: RunHosts, tmp_path: Path
) -> None:
    result = run_hosts("--directory", "separate", "--steps", str(STEPS), "--cut", "inference2", "--seconds", "12")
    assert set(result["exit_codes"].values()) == {0}, result
    assert result["steps"] == STEPS
    assert result["staleness_max"] <= 2
    assert any("is removed until it recovers" in line for line in result["named"]), "it is named"
    (copies,) = (tmp_path / "cache1").glob("*/relayed/weights")
    assert steps_in(copies)[-1] == STEPS, "it joins again"
    trainer, orchestrator = RunPaths(tmp_path / "trainer"), RunPaths(tmp_path / "orchestrator")
    assert steps_in(orchestrator.weights_dir)[-1] == steps_in(trainer.weights_dir)[-1] == STEPS
    assert orchestrator.ledger_dir.exists() and not trainer.ledger_dir.exists(), "each has its own directory"
    second = RunPaths(tmp_path / "trainer2")
    assert steps_in(second.rollouts_dir)[-1] == STEPS - 1 and not second.weights_dir.exists(), "so has each node"
    assert len(list(second.rollouts_dir.glob(f"*/{ROWS_FILE}"))) < STEPS, "trained rows are deleted"


def test_killed_trainer_host_ends_the_run_and_is_named(run_hosts: RunHosts) -> None:
    result = run_hosts("--directory", "relay", "--steps", "1000", "--kill", "trainer2", "--dead", "20")
    codes = result["exit_codes"]
    assert codes["trainer2"] == -9
    assert codes["trainer1"] not in (0, None) and codes["orchestrator"] == 1, "both end by themselves"
    errors = [line for line in result["named"] if line.startswith("error: ")]
    assert any("trainer_1 (pid" in line and "on trainer2" in line for line in errors), "the orchestrator's"
    assert any("no message from trainer2 for" in line for line in errors), "the other rank's"
