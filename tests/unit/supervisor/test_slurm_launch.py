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

RECIPES = {
    "INFERENCE": Path("configs/inference/debug.toml").absolute(),
    "ORCHESTRATOR": Path("configs/orchestrator/reverse_text.toml").absolute(),
    "TRAINER": Path("configs/trainer/debug.toml").absolute(),
}

# Servers run until they are stopped; the others exit with the code in their variable, once all have been started.
RUN_ROLE = """#!/usr/bin/env bash
[[ " $* " == *" inference "* ]] && echo $$ >> "$CALLS.servers" # before its call: the last one ends the servers
printf '%s\\n' "$(printf '%q ' "$@")" >> "$CALLS" # in one write: they run at the same time
[[ " $* " == *" inference "* ]] && exec sleep 600
until (($(wc -l < "$CALLS") == INFERENCE_NODES + 2)); do sleep 0.01; done
case " $* " in
    *" orchestrator "*) exit "$ORCHESTRATOR_CODE" ;;
    *" prime_rl.trainer.torchrun "*) exit "$TRAINER_CODE" ;;
esac
"""
STOP_SERVERS = '#!/usr/bin/env bash\n[[ "$*" == "--signal TERM 7" ]] && kill $(< "$CALLS.servers")\n'
FOUR_NODES = """#!/usr/bin/env bash
case "$*" in
    "show hostnames n[1-4]") printf "%s\\n" n1 n2 n3 n4 ;;
    "show job 7 --oneliner") echo "JobId=7 Requeue=1 Restarts=0 BatchFlag=1" ;;
    *) exit 1 ;;
esac
"""


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

    write.calls = lambda: [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []
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
    programs(sbatch=RECORD + "echo '7;cluster'\n", uv=RECORD + "exit 3\n")
    config = load(tmp_path, "--slurm.partition", "gpu", "--slurm.options", "qos=high,mem=0", "--ckpt")
    line = submit_to_slurm(config)
    assert line.startswith("submitted job 7; script ") and line.endswith("/logs/slurm-7.log")
    [[option, script]] = programs.calls()
    assert option == "--parsable"
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
    variables = variables_of(script)
    assert (variables["GPUS"], variables["INFERENCE_NODES"], variables["RESUME"]) == ("8", "2", "1")
    output_dir = config.output_dir
    assert variables["OUTPUT_DIR"] == str(output_dir)
    assert InferenceConfig.load(["@", variables["INFERENCE"]]).parallel.dp == 8
    assert OrchestratorConfig.load(["@", variables["ORCHESTRATOR"]]).output_dir == output_dir
    assert TrainerConfig.load(["@", variables["TRAINER"]]).output_dir == output_dir


def variables_of(script):
    exported = bash("-c", f"{script.read_text().partition('set -euo')[0]}\nenv").stdout.splitlines()
    return dict(line.partition("=")[::2] for line in exported)


def test_rl_slurm_with_nodes_of_both_roles_divides_their_gpus(tmp_path, programs):
    config = load(
        tmp_path, "--slurm.nodes", "2", "--slurm.inference-nodes", "2", "--slurm.trainer-nodes", "2",
        "--inference-gpus", "3", "--trainer-gpus", "5", "--no-slurm.submit",
    )  # fmt: skip
    submit_to_slurm(config)
    script = tmp_path / "my run" / "slurm" / "rl.sbatch"
    assert options_of(script)["gpus-per-node"] == "8"
    expected = {"INFERENCE_NODES": "2", "TRAINER_NODES": "2", "GPUS": "5"}
    expected |= {"INFERENCE_GPU_IDS": "0,1,2", "TRAINER_GPU_IDS": "3,4,5,6,7"}
    assert expected.items() <= variables_of(script).items()


def test_rl_slurm_reports_the_error_of_sbatch_and_refuses_impossible_nodes(tmp_path, programs):
    programs(sbatch="#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    for arguments, gpus in ([], 2), (["--slurm.gpus-per-node", "0"], 0):
        with pytest.raises(RunError, match=rf"failed: invalid partition; the job asks for 1 node\(s\) with {gpus} GPU"):
            submit_to_slurm(load(tmp_path, *arguments))
    for argument, message in (
        ("--slurm.inference-nodes=2", "leaves none of the 2 nodes for the trainer"),
        ("--no-inference", "slurm.nodes > 1 starts a server"),
    ):
        with pytest.raises(ConfigError, match=message):
            submit_to_slurm(load(tmp_path, "--slurm.nodes", "2", argument))


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


@pytest.fixture
def run_rl_script(programs):
    """Run rl.sbatch as Slurm does; returns its result and the arguments of each srun."""

    def run(**variables):
        programs(srun=RUN_ROLE, scontrol=FOUR_NODES, scancel=STOP_SERVERS)
        fixed = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8", "INFERENCE_NODES": "1"}
        fixed |= {"OUTPUT_DIR": "/shared/run", "ORCHESTRATOR_CODE": "0", "TRAINER_CODE": "0"}
        done = bash(TEMPLATES / "rl.sbatch", **fixed | {name: str(path) for name, path in RECIPES.items()} | variables)
        return done, programs.calls()

    return run


def after(words: list[str], word: str) -> list[str]:
    return words[words.index(word) + 1 :]


def test_slurm_script_starts_servers_orchestrator_and_one_trainer_on_the_other_nodes(run_rl_script, monkeypatch):
    done, calls = run_rl_script(INFERENCE_NODES="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert all("--kill-on-bad-exit=1" in call for call in calls)
    commands = ("inference", "orchestrator", "prime_rl.trainer.torchrun")
    by_command = {name: [call for call in calls if name in call] for name in commands}
    assert [after(call, "--nodelist")[0] for call in sorted(by_command["inference"])] == ["n1", "n2"]
    for call in by_command["inference"]:
        server = InferenceConfig.load(after(call, "inference")).server
        assert (server.host, server.port) == ("0.0.0.0", 8000)
    [call] = by_command["orchestrator"]
    assert OrchestratorConfig.load(after(call, "orchestrator")).client.urls == ["http://n1:8000", "http://n2:8000"]
    [call] = by_command["prime_rl.trainer.torchrun"]
    assert after(call, "--nodelist")[0] == "n3,n4"
    assert after(call, "--nodes")[0] == after(call, "--ntasks")[0] == "2", "not what the job has"
    words = after(call, "prime_rl.trainer.torchrun")
    assert words[: words.index("--rdzv-id")] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert after(words, "--rdzv-endpoint")[0] == "n3:29400"
    monkeypatch.setenv("OUTPUT_DIR", "/shared/run")
    assert str(TrainerConfig.load(after(words, "src/prime_rl/trainer/rl/train.py")).output_dir) == "/shared/run"
    parsed = pytest.importorskip("torch.distributed.run").get_args_parser().parse_args(words)
    assert parsed.training_script == "src/prime_rl/trainer/rl/train.py" and Path(parsed.training_script).exists()


@pytest.mark.extended
@pytest.mark.parametrize("role", ["ORCHESTRATOR", "TRAINER"])
def test_slurm_script_exits_with_the_code_of_the_failed_process(run_rl_script, role):
    done, _ = run_rl_script(**{f"{role}_CODE": "3"})
    assert done.returncode == 3


def test_slurm_script_divides_the_gpus_of_nodes_with_both_roles(run_rl_script):
    shared = {"INFERENCE_NODES": "4", "TRAINER_NODES": "2"}
    done, calls = run_rl_script(**shared)
    assert (done.returncode, calls) == (2, [])
    assert "set INFERENCE_GPU_IDS and TRAINER_GPU_IDS" in done.stderr
    done, calls = run_rl_script(INFERENCE_NODES="4")
    assert (done.returncode, calls) == (2, []) and "leave 0 for the trainer" in done.stderr
    done, calls = run_rl_script(**shared, INFERENCE_GPU_IDS="0,1,2", TRAINER_GPU_IDS="3,4", GPUS="2")
    assert (done.returncode, done.stderr) == (0, "")
    servers = [after(call, "--nodelist") for call in calls if "inference" in call]
    assert {tuple(words[1:5]) for words in servers} == {("env", "CUDA_VISIBLE_DEVICES=0,1,2", "uv", "run")}
    assert sorted(words[0] for words in servers) == ["n1", "n2", "n3", "n4"]
    [words] = [after(call, "--nodelist") for call in calls if "prime_rl.trainer.torchrun" in call]
    assert words[:3] == ["n3,n4", "env", "CUDA_VISIBLE_DEVICES=3,4"]
