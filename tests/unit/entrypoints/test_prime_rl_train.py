"""The commands of nanochatAquaRat's guide, as typed, and what they mean for `rl`."""

import os
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from scripts.prime_rl_train import COMPUTED, KEYS, leave_torchrun, translate

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError

ROOT = Path(__file__).parents[3]

COMMANDS = {
    "": {"max_steps": 400, "output_dir": "outputs/prime_rl_default", "wandb": None},
    "-- --run=my_experiment": {"output_dir": "outputs/my_experiment"},
    "--config configs/prime_rl/small_scale.toml": {"max_steps": 100},
    "-- --config configs/prime_rl/distributed.toml": {"trainer_gpu_ids": [6, 7]},
    "--run=custom_experiment --num_train_examples=5000 --learning_rate=1e-4 --num_samples=32 --eval_every=50": {
        "output_dir": "outputs/custom_experiment",
        "orchestrator.rollouts_per_example": 32,
        "orchestrator.batch_size": 16 * 32,
        "orchestrator.val.interval": 50,
        "trainer.optim.type": "adamw",
        "trainer.optim.lr": 1e-4,
        "trainer.optim.matrix_lr": None,
        "trainer.scheduler.factor": 1,
    },
    "--device_batch_size=4 --num_samples=8 --save_every=5 --dtype=float32": {
        "trainer.model.seq_len": 4 * 1024,
        "trainer.model.dtype": "float32",
        "orchestrator.batch_size": 16 * 8,
        "ckpt.interval": 5,
    },
    "--examples_per_step 4 --num_epochs 2 --num_eval_examples 9 --source=sft": {
        "orchestrator.batch_size": 4 * 16,
        "max_epochs": 2,
        "orchestrator.val.num_examples": 9,
    },
    "--matrix_lr=0.01 --top_k=20 --model.name Qwen/Qwen3-0.6B": {
        "trainer.optim.matrix_lr": 0.01,
        "orchestrator.sampling.top_k": 20,
        "model.name": "Qwen/Qwen3-0.6B",
    },
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in (name for name in os.environ if name.startswith("WANDB_")):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_the_guide_means_the_same(line):
    config = RLConfig.load(translate(shlex.split(line), {}))
    for key, expected in COMMANDS[line].items():
        found = attrgetter(key)(config)
        assert (str(found) if isinstance(found, Path) else found) == expected, key
    if "num_train_examples=5000" in line or "num_eval_examples" in line:
        values = (5000, 254) if "5000" in line else (2000, 9)
        names = ("num_train_examples", "num_eval_examples")
        assert config.orchestrator.env[0].args == dict(zip(names, values, strict=True))


def test_key_of_wandb_switches_it_on_with_the_projects_name(monkeypatch):
    on = RLConfig.load(translate(["--run=first"], {"WANDB_API_KEY": "k"}))
    assert (on.wandb.project, on.wandb.name) == ("nanochat-prime-rl", "first")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert RLConfig.load(translate([], {"WANDB_API_KEY": "k", "WANDB_PROJECT": "mine"})).wandb.project == "mine"
    assert RLConfig.load(translate(["--run=dummy"], {"WANDB_API_KEY": "k"})).wandb is None


@pytest.mark.parametrize(("gpus", "inference", "trainer"), [(2, [0], [1]), (8, [0, 1, 2, 3, 4, 5], [6, 7])])
def test_processes_of_torchrun_become_gpus(gpus, inference, trainer):
    config = RLConfig.load(translate(["--"], {}, gpus))
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (inference, trainer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--source=base", "--source=base: .* set --model.name DIR"),
        ("--num_samples", "--num_samples needs a value"),
        ("--num_samples=many", "whole numbers: .*'many'"),
        ("--config none.toml --num_samples=2", "--config none.toml cannot be read"),
        ("--config configs/reverse_text/sft_cpu.toml --num_samples=2", "has no 'orchestrator'"),
    ],
)
def test_bad_flag_is_refused_in_one_line(line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        translate(shlex.split(line), {})
    assert "\n" not in str(caught.value)


def test_torchrun_is_left_by_all_but_the_first_process():
    variables = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_PORT": "1", "PATH": "/bin"}
    first = {**variables, "RANK": "0"}
    assert leave_torchrun(first) == 4 and first == {"PATH": "/bin"}
    assert leave_torchrun({**variables, "RANK": "1"}) == 0
    assert leave_torchrun({"PATH": "/bin"}) == 1


def test_torchrun_on_several_nodes_names_the_command_of_rl():
    variables = {"WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    with pytest.raises(ConfigError, match="starts 32 processes on 4 nodes") as caught:
        leave_torchrun({**variables, "RANK": "0"})
    assert leave_torchrun({**variables, "RANK": "9"}) == 0, "one message for all processes"
    command = str(caught.value).split("uv run rl ")[1].split(" (")[0]
    config = RLConfig.load(shlex.split(command.replace("FILE", "configs/prime_rl/distributed.toml")))
    assert (config.inference_nodes, config.nodes) == (3, ["HOST1", "HOST2", "HOST3", "HOST4"])
    assert config.inference_gpu_ids == config.trainer_gpu_ids == list(range(8))


def test_variables_of_torchrun_without_torchrun_have_no_effect(capsys):
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "0"}
    assert leave_torchrun(variables) == 1 and variables == {}
    assert capsys.readouterr().err == (
        "warning: RANK and WORLD_SIZE have no effect: torchrun did not start this process\n"
    )


def test_module_prints_its_help_or_the_command_without_running_it():
    def printed(*arguments):
        command = [sys.executable, "-m", "scripts.prime_rl_train", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    text = printed("--help")
    assert all(f"--{flag} " in text for flag in (*KEYS, *COMPUTED))
    assert printed("--print", "--run=first") == "rl @ configs/prime_rl/default.toml --exp_id first\n"
