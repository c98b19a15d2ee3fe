"""`rl` on several nodes. `ssh` is a script that runs its command on this machine and records its arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.launch import spread_over_nodes
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.remote_launch import make_script, remote_command

SSH = """\
#!/usr/bin/env bash
shift 2 # -o BatchMode=yes
echo "$*" >> "$CALLS"
shift
exec "$@"
"""
KEY = "INFERENCE_SERVER_API_KEY"
ON_NODES = ["--model.name", "m", "--inference", "--orchestrator.env.0.id", "e"]
THREE = ["--nodes", "a,b,c"]


@pytest.fixture
def run(tmp_path):
    """Run a Python program on nodes; return its exit code, output, and the arguments of each ssh."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)

    def run(program, nodes="n1,n2", **environment):
        command = remote_command("ssh", nodes.split(","), [sys.executable, "-c", program, "{node_rank}"])
        given = {
            **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"),
            **environment,
        }  # fmt: skip
        done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr, (tmp_path / "calls").read_text()

    return run


def test_command_runs_on_each_node_with_the_environment_that_no_command_line_shows(run, tmp_path):
    program = (
        f"import os, sys; print(sys.argv[1], os.environ['PRIME_RL_NODE'], os.environ['{KEY}'] == sys.stdin.read() or "
        f"repr(os.environ['{KEY}']), os.getcwd())"
    )
    code, output, calls = run(program, **{KEY: "it's secret\n$HOME"})
    assert code == 0, output
    place, key = os.path.realpath(tmp_path), repr("it's secret\n$HOME")
    assert sorted(output.splitlines()) == [f"{rank} n{rank + 1} {key} {place}" for rank in (0, 1)]
    assert sorted(calls.splitlines()) == ["n1 bash -s", "n2 bash -s"]


def test_failure_on_one_node_ends_the_command_on_all(run):
    program = "import sys, time; sys.exit(3) if sys.argv[1] == '1' else time.sleep(300)"
    code, output, _ = run(program, "n1,n2,n3")
    assert code == 3
    assert "the command on n2 ended with exit code 3" in output


def test_script_leaves_out_what_belongs_to_the_node():
    environment = {"HOME": "/root", "SLURM_JOB_ID": "7", "SSH_AUTH_SOCK": "x", "HF_HOME": "/hf", "BASH_FUNC_f%%": "()"}
    script = make_script(["run", "a b"], environment, Path("/a dir"), "n1", 0)
    assert script.splitlines() == [
        "export HF_HOME=/hf",
        "export PRIME_RL_NODE=n1",
        "cd '/a dir' || exit 1",
        "exec run 'a b' < /dev/null",
    ]


def test_spread_over_nodes_places_servers_and_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "")
    arguments = [*ON_NODES, *THREE, "--output-dir", str(tmp_path), "--trainer-gpu-ids", "0,1", "--ckpt"]
    config = spread_over_nodes(RLConfig.load(arguments))
    assert config.orchestrator.client.urls == ["http://a:8000"]
    assert config.inference.server.host == "0.0.0.0"
    assert len(os.environ[KEY]) == 32
    server, orchestrator, trainer = make_process_specs(config, RunPaths(tmp_path))
    assert server.name == "inference_a" and not server.must_finish
    assert list(server.argv[2:6]) == ["prime_rl.supervisor.remote_launch", "ssh", "a", "--"]
    assert "prime_rl.supervisor.remote_launch" not in orchestrator.argv
    words = list(trainer.argv)
    assert words[4:6] == ["b,c", "--"]
    assert {"--nnodes=2", "--node-rank={node_rank}", "--nproc-per-node=2", "--master-addr=b"} <= set(words)
    assert trainer.is_last and trainer.request_stop is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*THREE, "--inference-nodes", "3"], "leaves none of the 3 nodes for the trainer"),
        (["--nodes", "a,-oProxyCommand=x"], "'-oProxyCommand=x' is not the name"),
        (["--nodes", "a,b", "--bench"], "nodes cannot be combined with bench"),
    ],
)
def test_nodes_that_cannot_work_are_refused(arguments, message):
    with pytest.raises((ConfigError, ValidationError), match=message):
        RLConfig.load([*ON_NODES, *arguments])


def test_nodes_of_slurm_outside_of_a_job_are_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError, match="this is no Slurm job"):
        spread_over_nodes(RLConfig.load([*ON_NODES, "--nodes", "slurm"]))
