"""The GPU scenarios are valid trainer options and are recorded in a table."""

import importlib.util
import sys
from pathlib import Path

import pytest

from prime_rl.configs.training.common import check_memory
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_settings_are_valid_trainer_options(monkeypatch):
    scenarios = load("scenarios", monkeypatch)
    for scenario in scenarios.SCENARIOS.values():
        assert scenario.row % scenario.sequence == 0
        for way in scenario.ways:
            config = TrainerModelConfig(seq_len=scenario.row, **way)
            check_memory(config, AdamWConfig())
        small = scenarios.tiny(scenario)
        assert small.row % small.sequence == 0 and small.goal is None


@pytest.mark.slow
def test_tiny_scenario_is_recorded(monkeypatch, tmp_path, capsys):
    load("scenarios", monkeypatch)
    step = load("trainer_step", monkeypatch)
    # main() sets it unless it is set: monkeypatch removes it after the test.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    target = tmp_path / "step.json"
    arguments = ["trainer_step.py", "--scenario", "rl-16k-low-memory", "--tiny", "--device", "cpu", "--no-compile"]
    arguments += ["--steps", "1", "--warmup", "1", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", arguments)
    step.main()
    monkeypatch.setattr(sys, "argv", ["trainer_step.py", "--table", "--json", str(target)])
    capsys.readouterr()
    step.main()
    header, _, line = capsys.readouterr().out.strip().split("\n")
    assert "rl-16k-low-memory" in line and "optim_cpu_offload" in line
    assert header.count("|") == line.count("|")
