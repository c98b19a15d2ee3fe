"""`rl` trains an adapter and publishes only the adapter; the server keeps the base model."""

from pathlib import Path

import pytest

from prime_rl.storage.paths import steps_in
from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import metrics_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4


def test_run_that_publishes_adapters_agrees_with_the_sampler(start: StartCommand, tmp_path: Path) -> None:
    """Rollouts in flight continue with each new version; inference and trainer agree (I5, I6)."""
    values = rl_values(tmp_path / "run", inference=own_server(), max_steps=STEPS, async_level=1)
    lora = {"rank": 4, "alpha": 16, "publish": "adapter"}
    values["trainer"] = {"optim": {"lr": 5e-2}, "model": {"lora": lora}}
    run = start("rl", values, tmp_path / "run")
    assert run.end() == 0, run.story()
    shipped, trained = metrics_of(run.paths, "orchestrator"), metrics_of(run.paths, "trainer")
    assert [line["step"] for line in shipped] == [line["step"] for line in trained] == list(range(STEPS))
    differences = [line["canary/max_logprob_difference"] for line in shipped if line["policy/version"] > 0]
    assert differences and max(differences) <= 1e-4
    assert all(line["mismatch_kl/on_policy"] < 1e-4 for line in trained if line["mismatch_kl/on_policy"] is not None)
    assert all(line["staleness/max"] <= 1 for line in shipped)
    last = run.paths.weights(steps_in(run.paths.weights_dir)[-1])
    assert {file.name for file in last.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    }  # fmt: skip
    assert run.errors == ""
