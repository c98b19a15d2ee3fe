"""`rl --slurm` and the files of deploy/slurm and deploy/skypilot, with scripts in place of the commands they call."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.supervisor.slurm_launch import TEMPLATES, submit_to_slurm

RECORD = '#!/bin/bash\nprintf "%s\\n" "$(printf "%q " "$@")" >> "$CALLS"\n'
# Runs the command once for each node.
SRUN = RECORD + 'for node in 0 1 2; do SLURM_NODEID=$node "${@:8}" || exit; done\n'


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put recording scripts in front of the PATH; `programs(uv=TEXT)` writes one, `programs.calls()` reads."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    for name in ("INFERENCE_SERVER_IP", "SLURM_RESTART_COUNT", "RESUME"):
        monkeypatch.delenv(name, raising=False)

    def write(**scripts):
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    write.calls = lambda: [shlex.split(line) for line in calls.read_text().splitlines()]
    return write


def load(tmp_path, *arguments):
    return RLConfig.load(["--inference", "--output-dir", str(tmp_path / "my run"), "--slurm", *arguments])


def bash(script, *arguments, **variables):
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=240)


def options_of(script):
    lines = [line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    return dict(line.partition("=")[::2] for line in lines)


def test_rl_slurm_on_one_node_submits_a_script_that_starts_rl(tmp_path, programs):
    programs(sbatch=RECORD + "echo Submitted batch job 7\n", uv=RECORD + "exit 3\n")
    config = load(tmp_path, "--slurm.partition", "gpu", "--slurm.options", "qos=high,mem=0", "--ckpt")
    assert submit_to_slurm(config).startswith("Submitted batch job 7; script ")
    [[script]] = programs.calls()
    options = options_of(Path(script))
    assert (options["partition"], options["qos"], options["gpus-per-node"]) == ("gpu", "high", "2")
    assert options["signal"] == "B:TERM@120" and "requeue" in options and "account" not in options
    assert bash(script).returncode == 3, "the exit code of rl"
    assert bash(script, SLURM_RESTART_COUNT="1").returncode == 3
    first, requeued = programs.calls()[1:]
    assert first[:3] == ["run", "rl", "@"] and requeued == [*first, "--ckpt.resume-step", "-1"]
    again = RLConfig.load(requeued[2:])
    assert again.slurm is None and again.output_dir == config.output_dir and again.ckpt.resume_step == -1


def test_one_node_script_passes_sigterm_on_and_waits(tmp_path, programs):
    programs(uv="#!/usr/bin/env bash\ntrap 'kill $!; echo saved; exit 5' TERM\nkill -TERM $PPID\nsleep 300 & wait\n")
    done = bash(TEMPLATES / "one_node.sbatch", "x.toml", OUTPUT_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (5, "saved\n")


def test_rl_slurm_on_several_nodes_writes_what_the_script_starts(tmp_path, programs):
    config = load(
        tmp_path, "--slurm.nodes", "4", "--slurm.inference-nodes", "2", "--inference-gpus", "8", "--trainer-gpus", "8",
        "--no-slurm.submit", "--ckpt", "--ckpt.resume-step", "-1",
    )  # fmt: skip
    assert submit_to_slurm(config).startswith("wrote ")
    script = tmp_path / "my run" / "slurm" / "rl.sbatch"
    options = options_of(script)
    assert (options["nodes"], options["gpus-per-node"], options["ntasks-per-node"]) == ("4", "8", "1")
    exported = bash("-c", f"{script.read_text().partition('set -euo')[0]}\nenv").stdout.splitlines()
    variables = dict(line.partition("=")[::2] for line in exported)
    assert (variables["GPUS"], variables["INFERENCE_NODES"], variables["RESUME"]) == ("8", "2", "1")
    output_dir = config.output_dir
    assert variables["OUTPUT_DIR"] == str(output_dir)
    assert InferenceConfig.load(["@", variables["INFERENCE"]]).parallel.dp == 8
    assert OrchestratorConfig.load(["@", variables["ORCHESTRATOR"]]).output_dir == output_dir
    assert TrainerConfig.load(["@", variables["TRAINER"]]).output_dir == output_dir


def test_rl_slurm_reports_the_error_of_sbatch(tmp_path, programs):
    programs(sbatch="#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(RunError, match="failed: invalid partition"):
        submit_to_slurm(load(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm.nodes", "2", "--slurm.inference-nodes", "2"], "leaves none of nodes = 2 for the trainer"),
        (["--slurm.nodes", "2", "--no-inference"], "slurm.nodes > 1 starts a server"),
    ],
)
def test_rl_slurm_refuses_impossible_nodes(tmp_path, programs, arguments, message):
    programs(sbatch=RECORD)
    with pytest.raises(ConfigError, match=message):
        submit_to_slurm(load(tmp_path, *arguments))


def test_sft_script_starts_torchrun_on_each_node(tmp_path, programs):
    programs(srun=RECORD, scontrol="#!/bin/sh\nprintf '%s\\n' a b c\n")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "OUTPUT_DIR": str(tmp_path), "GPUS": "4"}
    recipe = str(Path("configs/sft/gsm8k.toml").absolute())
    script = TEMPLATES / "sft.sbatch"
    assert bash(script, recipe, "--max-steps", "3", SLURM_RESTART_COUNT="2", **variables).returncode == 0
    [words] = programs.calls()
    assert words[:7] == ["--kill-on-bad-exit=1", "--nodes", "3", "--ntasks", "3", "--ntasks-per-node", "1"]
    torchrun = words[words.index("prime_rl.trainer.torchrun") + 1 :]
    parsed = pytest.importorskip("torch.distributed.run").get_args_parser().parse_args(torchrun)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("3", "4", "a:29400")
    assert parsed.training_script == "prime_rl.trainer.sft.train"
    config = SFTConfig.load(parsed.training_script_args)
    assert (config.ckpt.resume_step, config.max_steps) == (-1, 3)


def test_inference_script_divides_the_copies_among_the_nodes(tmp_path, programs):
    programs(srun=SRUN, uv=RECORD, scontrol="#!/bin/sh\nprintf '%s\\n' a b c\n")
    variables = {"SLURM_JOB_NODELIST": "x", "INFERENCE_SERVER_API_KEY": "k", "GPUS": "8", "TENSOR_PARALLEL": "4"}
    recipe = str(Path("configs/inference/debug.toml").absolute())
    done = bash(TEMPLATES / "inference.sbatch", recipe, **variables)
    assert (done.returncode, done.stdout) == (0, "serving at http://a:8000/v1\n"), done.stderr
    nodes = [InferenceConfig.load([*words[2:], "--parallel.address", "a"]) for words in programs.calls()[1:]]
    assert [(one.parallel.headless, one.parallel.start_rank, one.parallel.dp_local) for one in nodes] == [
        (False, None, 2), (True, 2, 2), (True, 4, 2),
    ]  # fmt: skip
    assert {(one.parallel.dp, one.parallel.tp, one.server.host) for one in nodes} == {(6, 4, "0.0.0.0")}


def test_skypilot_task_starts_a_valid_command(tmp_path, programs):
    """Runs both of its scripts; what they call records its arguments."""
    task = yaml.safe_load((TEMPLATES.parent / "skypilot" / "rl.yaml").read_text())
    programs(uv=RECORD, sudo=RECORD, bash=RECORD)
    variables = task["envs"] | task["secrets"] | {"RECIPE": str(Path(task["envs"]["RECIPE"]).absolute())}
    for part in ("setup", "run"):
        done = subprocess.run(["/bin/bash", "-eu", "-c", task[part]], env=os.environ | variables, capture_output=True)
        assert done.returncode == 0, done.stderr
    words = programs.calls()
    assert ["scripts/install.sh", "--gpu"] in words
    assert words[-1][:4] == ["run", "--extra", "gpu", "rl"]
    config = RLConfig.load(words[-1][4:])
    assert (len(config.inference_gpu_ids), config.ranks, config.ckpt.resume_step) == (6, 2, -1)
