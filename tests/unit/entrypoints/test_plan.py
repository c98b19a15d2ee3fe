"""`plan`: published figures, what it prints and refuses, and that its advice helps."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.entrypoints import plan, rl
from prime_rl.supervisor import launch
from prime_rl.supervisor.planning import gpu_table, plan_changes
from prime_rl.supervisor.planning.gpu_table import find_gpu, parse_gpus
from prime_rl.supervisor.planning.model_shape import load_shape
from prime_rl.supervisor.planning.published_figures import FIGURES, MEMORY_TOLERANCE, SPEED_TOLERANCE, PublishedFigure

ROOT = Path(__file__).parents[3]
OTHER_FIGURES = (  # of the same source, and not used for the constants
    PublishedFigure("8xH100", "Qwen3-4B", "full", 16384, 4.688, 17.1),
    PublishedFigure("8xH100", "Qwen3-4B", "full", 65536, 30.29, 36.1),
    PublishedFigure("8xH100", "Qwen3-4B", "lora", 16384, 5.38, 10.3),
    PublishedFigure("8xH100", "Qwen3-4B", "lora", 65536, 32.0, 28.8),
    PublishedFigure("8xH100", "Qwen3-4B", "sft", 16384, 5.015, 54.6),
    PublishedFigure("8xH100", "Qwen3-30B-A3B", "full", 16384, 8.174, 74.6),
)


@pytest.mark.parametrize(("figures", "expected"), [(FIGURES, (17, 16, 15)), (OTHER_FIGURES, (6, 6, 6))])
def test_plan_is_near_published_figures(figures, expected):
    """15 of the 19 rows, in memory and speed; rows 10, 16, 17 and 19 were measured with other code (see the module)."""
    near = [
        (abs(memory) <= MEMORY_TOLERANCE, abs(speed) <= SPEED_TOLERANCE)
        for memory, speed in (figure.errors for figure in figures)
    ]
    found = sum(m for m, _ in near), sum(s for _, s in near), sum(all(both) for both in near)
    assert all(a >= b for a, b in zip(found, expected, strict=True)), found


def run(capsys, line):
    code = plan._main([*shlex.split(line), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_one_process_is_planned_from_keys(capsys):
    line = "--model.name Qwen/Qwen3-4B --seq-len 16384 --gpus 1xH100 --role trainer --trainer.model.ac --price 2"
    code, result = run(capsys, line)
    trainer = result["trainer"]
    assert code == 0 and "inference" not in result
    assert trainer["parameters"] == trainer["trained_parameters"] == 4_022_468_096
    assert sum(trainer["memory_parts_gib"].values()) == pytest.approx(trainer["memory_gib"])
    assert 60 < trainer["memory_gib"] < trainer["usable_gib"] < 79
    assert sum(trainer["seconds"].values()) == pytest.approx(trainer["seconds_per_step"])
    cost = trainer["seconds_per_step"] / 3600 * 2
    assert result["cost"]["per_step"] == pytest.approx(cost) and result["version"]["full_gb"] == pytest.approx(
        8.045, 1e-3
    )


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("configs/presets/*.toml")), ids=lambda path: path.stem)
def test_presets_fit_the_gpus_of_their_names(recipe, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    size = "24" if "24gb" in recipe.stem else "80"
    monkeypatch.setattr(gpu_table, "detect_gpu", lambda: gpu_table.GPUS["RTX4090" if size == "24" else "A100"])
    code, result = run(capsys, f"@ {recipe}")
    assert code == 0, result["problems"]


def test_largest_run_is_planned(capsys):
    """106 billion parameters on 512 GPUs."""
    line = "--model.name zai-org/GLM-4.5-Air --seq-len 32768 --gpus 512xH100 --inference.parallel.tp 8 --async-level 4"
    more = " --trainer.model.ac --trainer.model.ep 8 --orchestrator.batch-size 2048 --max-steps 10 --price 2.5"
    code, result = run(capsys, line + more)
    assert code == 0 and result["gpus"] == 512 and result["trainer"]["parameters"] == 106_852_245_504
    best = result["step"]["best_division"]
    assert best["trainer"] + best["inference"] <= 512 and best["seconds"] <= result["step"]["seconds"]


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("--model.name Qwen3-4B --seq-len 16384 --role trainer", "1xH100"),
        ("--model.name Qwen3-0.6B --seq-len 65536 --role trainer", "1xRTX4090"),
        ("--model.name Qwen3-30B-A3B --seq-len 8192 --role trainer --trainer.model.ac", "2xH100"),
        ("--model.name Qwen3-32B --role inference --inference.parallel.tp 1", "8xRTX4090"),
        ("--model.name Qwen3-32B --role inference", "7xH100"),
        ("--model.name Qwen3-32B --role trainer --trainer.model.ac --trainer.model.optim-cpu-offload", "1xH100"),
    ],
)
def test_change_that_is_printed_makes_the_plan_fit(line, gpus, capsys):
    code, result = run(capsys, f"{line} --gpus {gpus}")
    assert code == 2 and result["changes"]
    change = result["changes"][0]["change"].replace(",", "")
    assert "GPUs" not in change and "rows" not in change
    code, result = run(capsys, f"{line} --gpus {gpus} {change}")
    assert code == 0 and result["changes"] == []


def test_text_names_parts_error_and_changes(capsys):
    assert plan._main(shlex.split("--model.name Qwen3-8B --gpus 2xA100-40 --inference.gpu-memory-utilization 0.4")) == 2
    text = capsys.readouterr().out
    for part in (
        "weights",
        "gradients",
        "optimizer",
        "KV cache",
        "tokens/s",
        "19 published figures",
        "does not fit: the",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--gpus 4xV100", ["4xV100", "H100"]),
        *((f"--gpus {gpus}", [gpus]) for gpus in ("0xH100", "1e3xH100", "xH100", "²xH100", "8xH100x2", "9999999xH100")),
        ("--gpus 1xH100 --inference.vllm.max_num_seqs abc", ["inference.vllm.max_num_seqs = 'abc'"]),
        ("--gpus 1xH100 --inference.vllm.max_num_batched_tokens -5", ["max_num_batched_tokens = -5"]),
        ("--gpus 2xH100 --role trainer --trainer.model.ep 2", ["trainer.model.ep = 2", "no experts"]),
        ("--gpus 1xH100 --completion-tokens 1e11", ["--completion-tokens 1e+11", "2048"]),
        ("--gpus 1xH100 --price inf", ["--price inf", "below 1e12"]),
        ("--gpus 1xH100 --model.name some/model", ["some/model", "config.json"]),
        ("--gpus 1xH100 --model.name Qwen/Qwen3-99B", ["qwen3-"]),
        ("--gpus 1xH100 --price 0", ["--price 0"]),
        ("--gpus 1xH100 --trainer.model.tpp 2", ["--trainer.model.tpp"]),
        ("--gpus 6xH100 --role trainer --trainer.model.cp 4", ["6 GPUs", "model.cp 4"]),
        ("--gpus 3xH100 --trainer.model.tp 3", ["trainer.model.tp = 3"]),
    ],
)
def test_bad_input_is_refused_in_one_line(line, named):
    with pytest.raises(ConfigError) as caught:
        plan._main(shlex.split(line))
    assert "\n" not in str(caught.value) and all(part in str(caught.value) for part in named)


def test_name_of_a_fine_tuned_model_has_the_shape_of_its_base():
    shapes = [load_shape(name) for name in ("a/Qwen3-30B-A3B-Mine", "Qwen/Qwen3-30B-A3B", "b/Qwen3-30B-A3B-Base-x")]
    assert {shape.parameters for shape in shapes} == {30_532_122_624} and "as qwen3-30b-a3b" in shapes[0].name
    assert load_shape("DeepSeek-R1-Distill-Qwen-1.5B").parameters == 1_777_088_000
    for name in ("DeepSeek-R1-Distill-Some-7B", "GLM-4.5V", "Qwen3-0.6"):
        with pytest.raises(ConfigError, match="unknown"):
            load_shape(name)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "gpt_oss"}', r"gpt_oss: .* trains, packed, ep, .*; tp: no: model.tp"),
        (
            '{"model_type": "images", "text_config": {"model_type": "qwen3"}}',
            "qwen3: .* trains, packed, tp, cp, ",
        ),
        ('{"model_type": "unheard"}', "unheard: not in the table"),
        ("{", None),
        ("[]", None),
    ],
)
def test_rl_dry_run_says_what_works_with_the_family(config, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setattr(sys, "argv", ["rl", "--model.name", str(tmp_path), "--dry-run"])
    with pytest.raises(SystemExit):
        rl.main()
    found = re.search("^model (.*)", capsys.readouterr().err, re.MULTILINE)
    assert found is None if said is None else re.match(said, found[1])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"hidden_size": float("inf")}, "hidden_size = inf"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"head_dim": 1.5}, "head_dim = 1.5"),
        ({"num_experts": True}, "num_experts = True"),
        ({"num_experts": None}, "none of num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok above num_experts"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ],
)
def test_impossible_layers_are_refused(config, named, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | experts))
    assert load_shape(str(tmp_path)).parameters > 0
    (tmp_path / "config.json").write_text(json.dumps(sizes | experts | config))
    with pytest.raises(ConfigError, match=named):
        load_shape(str(tmp_path))


def test_gpus_are_recognized_by_their_drivers_names():
    names = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA GeForce RTX 3090": "RTX3090", "NVIDIA A100-SXM4-40GB": "A100"}
    assert {name: find_gpu(name).name for name in names} == names
    assert find_gpu("Tesla V100") is None and find_gpu("NVIDIA A100-SXM4-40GB", 39.4).memory == 39.4
    assert parse_gpus("512xb200") == (512, gpu_table.GPUS["B200"])


@pytest.fixture
def rtx4090(monkeypatch):
    output = SimpleNamespace(stdout="NVIDIA GeForce RTX 4090, 24564\n")
    monkeypatch.setattr(gpu_table.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu_table.subprocess, "run", lambda *_, **__: output)


def test_only_a_plan_that_does_not_fit_this_machine_is_a_warning(rtx4090):
    line = ["--model.name", "Qwen/Qwen3-4B", "--inference"]
    warning = plan_changes.warning_for(RLConfig.load(line))
    assert "the trainer needs" in warning and "RTX4090" in warning and "--trainer.model" in warning
    for keys in (
        ["--model.name", "Qwen/Qwen3-0.6B", "--trainer.model.ac"],
        ["--model.name", "an/unknown-model"],
        [*line, "--trainer.device", "cpu"],
    ):
        assert plan_changes.warning_for(RLConfig.load(keys)) is None


def test_rl_prints_the_warning_at_its_start(rtx4090, tmp_path, monkeypatch, capsys):
    for name in ("check_before_start", "check_on_hub", "clear_run_directory", "packages_unlike_the_lock"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    monkeypatch.setattr(launch, "identify_all", lambda run, *_: run)
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(launch, "unreachable_servers", Mock(side_effect=RunError("the rest is not tried")))
    config = RLConfig.load(["--model.name", "Qwen/Qwen3-4B", "--output-dir", str(tmp_path)])
    with pytest.raises(RunError, match="the rest"):
        launch.run(config, Mock(run=Mock(return_value=1)))
    assert "warning: by the estimate of `plan`, the trainer needs" in capsys.readouterr().out
