"""`rl` trains an adapter and publishes only the adapter; the server keeps the base model."""

from pathlib import Path

import pytest

from prime_rl.storage.paths import steps_in
from tests.integration.rl.conftest import MODEL, ORCHESTRATOR, StartCommand, of_server, own_server, rl_values
from tests.support.command import json_lines, metrics_of, until
from tests.support.server import inference_server

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


def test_two_runs_share_a_server(start: StartCommand, tmp_path: Path) -> None:
    """Adapters of different ranks; each run samples, evaluates and ends with its own versions (I5, I6)."""
    arguments = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--model.max-model-len", "2048"]
    with inference_server(MODEL, tmp_path / "server.log", arguments) as server:
        runs = []
        for name, rank in (("alpha", 8), ("beta", 4)):
            pinned = {"mode": "pinned", "interval": 2, "env": [{**ORCHESTRATOR["env"][0], "num_examples": 4}]}
            sampling = {**ORCHESTRATOR, "client": of_server(server), "eval": pinned}
            values = rl_values(tmp_path / name, orchestrator=sampling, max_steps=STEPS, async_level=1)
            lora = {"rank": rank, "alpha": 16, "publish": "adapter"}
            values["trainer"] = {"optim": {"lr": 5e-2}, "model": {"lora": lora}}
            runs.append(start("rl", values, tmp_path / name))
        until(lambda: [slot["name"] for slot in server.policy()["slots"]] != [], "the first slot")
        assert runs[0].end(beside=runs[1]) == 0, runs[0].story()
        assert runs[1].end() == 0, runs[1].story()
        assert [run.errors for run in runs] == ["", ""]
        assert server.policy()["slots"] == [] and server.policy()["run_id"] is None
    for run in runs:
        shipped, trained = metrics_of(run.paths, "orchestrator"), metrics_of(run.paths, "trainer")
        assert [line["step"] for line in trained] == list(range(STEPS))
        versions = [line for line in shipped if "staleness/max" in line]
        assert [line["step"] for line in versions] == list(range(STEPS))
        assert all(line["staleness/max"] <= 1 for line in versions)
        differences = [line["canary/max_logprob_difference"] for line in versions if line["policy/version"] > 0]
        assert differences and max(differences) <= 1e-4
        assert all(
            line["mismatch_kl/on_policy"] < 1e-4 for line in trained if line["mismatch_kl/on_policy"] is not None
        )
        assert json_lines(run.paths.evals_dir / "reverse_text" / f"step_{STEPS}.jsonl")
