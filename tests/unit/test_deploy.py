"""The examples of deploy/ start valid commands. Slurm's own commands are replaced by scripts."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "rl.sbatch"
RECIPES = {
    "INFERENCE": ROOT / "configs/inference/debug.toml",
    "ORCHESTRATOR": ROOT / "configs/orchestrator/reverse_text.toml",
    "TRAINER": ROOT / "configs/trainer/debug.toml",
}

# Servers run until they are stopped; the others exit with the code in their variable, once all have been started.
SRUN = """#!/usr/bin/env bash
[[ " $* " == *" inference "* ]] && echo $$ >> "$CALLS.servers" # before its call: the last one ends the servers
printf '%s\\n' "$(printf '%q ' "$@")" >> "$CALLS" # in one write: they run at the same time
[[ " $* " == *" inference "* ]] && exec sleep 600
until (($(wc -l < "$CALLS") == INFERENCE_NODES + 2)); do sleep 0.01; done
case " $* " in
    *" orchestrator "*) exit "$ORCHESTRATOR_CODE" ;;
    *" prime_rl.trainer.torchrun "*) exit "$TRAINER_CODE" ;;
esac
"""
SCANCEL = '#!/usr/bin/env bash\n[[ "$*" == "--signal TERM 7" ]] && kill $(< "$CALLS.servers")\n'
SCONTROL = """#!/usr/bin/env bash
case "$*" in
    "show hostnames n[1-4]") printf "%s\\n" n1 n2 n3 n4 ;;
    "show job 7 --oneliner") echo "JobId=7 Requeue=1 Restarts=0 BatchFlag=1" ;;
    *) exit 1 ;;
esac
"""


def submit(tmp_path: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the script as Slurm does; return its result and the arguments of each srun."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_GPUS_ON_NODE": "8",
        "OUTPUT_DIR": "/shared/run",
        "INFERENCE_NODES": "1",
        "ORCHESTRATOR_CODE": "0",
        "TRAINER_CODE": "0",
        **{name: str(path) for name, path in RECIPES.items()},
        **variables,
    }
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=240)
    return done, [shlex.split(line) for line in calls.read_text().splitlines()]


def after(words: list[str], word: str) -> list[str]:
    return words[words.index(word) + 1 :]


def test_slurm_script_starts_servers_orchestrator_and_one_trainer_on_the_other_nodes(tmp_path, monkeypatch):
    done, calls = submit(tmp_path, INFERENCE_NODES="2")
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
    _torchrun_takes(words)


@pytest.mark.parametrize("role", ["ORCHESTRATOR", "TRAINER"])
def test_slurm_script_exits_with_the_code_of_the_failed_process(tmp_path, role):
    done, _ = submit(tmp_path, **{f"{role}_CODE": "3"})
    assert done.returncode == 3


def test_slurm_script_without_a_node_for_the_trainer_is_rejected(tmp_path):
    done, calls = submit(tmp_path, INFERENCE_NODES="4")
    assert (done.returncode, calls) == (2, [])
    assert "leave none for the trainer" in done.stderr


def _torchrun_takes(words: list[str]) -> None:
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    parsed = parser.parse_args(words)
    assert parsed.training_script == "src/prime_rl/trainer/rl/train.py", json.dumps(words)
    assert (ROOT / parsed.training_script).exists()
