"""`rl` on several nodes. `ssh` is a script that runs its command on this machine and records its arguments."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.ports import find_free_port
from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.liveness.heartbeat_writer import NodeHeartbeat
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.nodes import node_agent
from prime_rl.supervisor.nodes.node_launcher import RemoteOptions, make_script, remote_command
from prime_rl.supervisor.nodes.node_probe import num_gpus
from prime_rl.supervisor.nodes.placement import check_nodes, spread_over_nodes
from prime_rl.supervisor.preflight import check_gpus_of_nodes
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, alive, until
from tests.support.virtual_clock import virtual_clock

SSH = """\
#!/usr/bin/env bash
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
echo "$*" >> "$CALLS"
[[ $1 == unknown ]] && { echo "ssh: Could not resolve hostname unknown" >&2; exit 255; }
[[ $1 == late ]] && mkdir "$CALLS.late" 2> /dev/null && exit 255
shift
"$@"
"""
KEY = "INFERENCE_SERVER_API_KEY"
ON_NODES = ["--model.name", "m", "--inference", "--orchestrator.env.0.id", "e"]
THREE = ["--nodes", "a,b,c"]
LAUNCHER = (
    "from prime_rl.supervisor.nodes import node_launcher; node_launcher._SIBLING_SECONDS = {}; node_launcher.main()"
)
SLEEPS = "import subprocess, sys; subprocess.Popen(['sleep', '300'], start_new_session=True).wait()"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a Python program on nodes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PRIME_RL_ERROR_FILE", str(tmp_path / "error.json"))
    started = []

    def start(program, nodes="n1,n2", silence=60.0, sibling=1.0, **environment):
        options = RemoteOptions("ssh", nodes.split(","), "trainer", tmp_path, 5.0, silence)
        python, _, _, *arguments = remote_command(options, [sys.executable, "-c", program, "{node_rank}"])
        command = [python, "-c", LAUNCHER.format(sibling), *arguments]
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def run(start, tmp_path):
    """Run a Python program on nodes; return its exit code, output, and the arguments of each ssh."""

    def run(*arguments, **environment):
        process = start(*arguments, **environment)
        output, _ = process.communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
        return process.returncode, output, (tmp_path / "calls").read_text()

    return run


def test_command_runs_on_each_node_with_the_environment_that_no_command_line_shows(run, tmp_path):
    program = (  # one write, because the lines of the nodes are not ordered
        f"import os, sys; key = os.environ['{KEY}']; words = sys.argv[1], os.environ['PRIME_RL_NODE'], "
        "str(key == sys.stdin.read() or repr(key)), os.getcwd(); os.write(1, ' '.join(words).encode() + b'\\n')"
    )
    code, output, calls = run(program, **{KEY: "it's secret\n$HOME"})
    assert code == 0, output
    place, key = os.path.realpath(tmp_path), repr("it's secret\n$HOME")
    assert sorted(output.splitlines()) == [f"{rank} n{rank + 1} {key} {place}" for rank in (0, 1)]
    assert sorted(calls.splitlines()) == ["n1 bash -s", "n2 bash -s"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(3)", 3, "the command on n2 exited with code 3"),
        ("os.kill(os.getpid(), 9)", 137, "the command on n2 was killed by SIGKILL"),
    ],
)
def test_failure_on_one_node_ends_the_command_on_all_and_is_named(run, tmp_path, end, code, message):
    program = f"import os, sys, time; [{end}, time.sleep(300)] if sys.argv[1] == '1' else time.sleep(300)"
    status, output, _ = run(program)
    assert status == code
    assert message in output
    assert json.loads((tmp_path / "error.json").read_text())["message"] == message


def test_killed_command_is_named_instead_of_one_that_failed_because_of_it(run, tmp_path):
    effect = "[open('failed', 'w'), sys.exit(1)]"
    cause = "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('failed'), True)] + [os.kill(os.getpid(), 9)]"
    code, *_ = run(f"import os, sys, time; {cause} if sys.argv[1] == '1' else {effect}", sibling=600.0)
    assert code == 137
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "the command on n2 was killed by SIGKILL"


def test_node_that_cannot_be_reached_ends_the_command(run):
    code, output, _ = run("import time; time.sleep(300)", "unknown", 0.1)
    assert code == 1
    assert "Could not resolve hostname unknown" in output
    assert "ssh cannot start the command on unknown" in output


def test_node_that_can_be_reached_only_later_runs_the_command(run):
    code, output, calls = run("print('works')", "late")
    assert (code, output) == (0, "works\n")
    assert calls.splitlines() == ["late bash -s"] * 2


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_launcher_leaves_no_process_on_the_nodes(start, tmp_path, number):
    process = start(f"open(f'started{{__import__(\"sys\").argv[1]}}', 'w'); {SLEEPS}")
    until(lambda: len(list(tmp_path.glob("started*"))) == 2, "the command")
    children = psutil.Process(process.pid).children
    until(lambda: sum("sleep" in c.name() for c in children(recursive=True)) == 2, "its processes")
    there = children(recursive=True)
    process.send_signal(number)
    assert process.wait(PROGRESS_TIMEOUT_SECONDS) == (128 + number if number == signal.SIGTERM else -number)
    until(lambda: not any(map(alive, there)), "the end")


def test_node_that_answers_has_a_heartbeat(start, tmp_path):
    start(SLEEPS, "n1")
    until(lambda: "node_n1" in read_heartbeats(RunPaths(tmp_path)), "a heartbeat")
    first = read_heartbeats(RunPaths(tmp_path))["node_n1"]
    assert (first.host, first.role, first.boot_id) == ("n1", "trainer", "")
    until(lambda: read_heartbeats(RunPaths(tmp_path))["node_n1"].beat > first.beat, "the next one")


def agent(silence, program, stdin=subprocess.PIPE):
    command = [sys.executable, "-m", "prime_rl.supervisor.nodes.node_agent", str(silence), "5"]
    return subprocess.Popen([*command, sys.executable, "-c", program], stdin=stdin, stdout=subprocess.PIPE, text=True)


def test_agent_kills_its_command_after_silence():
    process = agent(0.4, SLEEPS)
    children = psutil.Process(process.pid).children
    output, _ = process.stdout.read(), process.wait(PROGRESS_TIMEOUT_SECONDS)
    assert process.returncode == 137
    assert output.splitlines()[-2:] == ["prime_rl.node silent", "prime_rl.node ended -9"]
    with pytest.raises(psutil.NoSuchProcess):
        children()


def test_agent_reports_the_end_of_its_command():
    process = agent(60, "pass")
    assert process.wait(PROGRESS_TIMEOUT_SECONDS) == 0  # while its stdin is open
    assert process.stdout.read().splitlines()[-1] == "prime_rl.node ended 0"


@virtual_clock
async def test_agent_that_hears_its_launcher_in_each_silence_continues(monkeypatch):
    answers = []
    monkeypatch.setattr(node_agent, "_write", lambda _, line: answers.append(line))
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        following = asyncio.ensure_future(node_agent._follow_launcher(60))
        for _ in range(node_agent._SILENCE_PARTS + 2):
            await asyncio.sleep(25)  # longer than a part of the silence
            os.write(writing, b"\n")
        assert not following.done()
        assert await following is False
        os.close(writing)
    assert len(answers) == 1 + node_agent._SILENCE_PARTS + 2


def test_script_leaves_out_what_belongs_to_the_node():
    environment = {"HOME": "/root", "SLURM_JOB_ID": "7", "SSH_AUTH_SOCK": "x", "HF_HOME": "/hf", "BASH_FUNC_f%%": "()"}
    script = make_script(["run", "a b"], environment, Path("/a dir"), "n1", 0)
    assert script.splitlines() == [
        "export HF_HOME=/hf",
        "export PRIME_RL_NODE=n1",
        "cd '/a dir' || exit 1",
        "exec run 'a b'",
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
    assert list(server.argv[2:7]) == ["prime_rl.supervisor.nodes.node_launcher", "--launcher", "ssh", "--nodes", "a"]
    assert "prime_rl.supervisor.nodes.node_launcher" not in orchestrator.argv
    words = list(trainer.argv)
    assert words[words.index("--nodes") + 1] == "b,c"
    assert {"--nnodes=2", "--node-rank={node_rank}", "--nproc-per-node=2", "--master-addr=b"} <= set(words)
    assert trainer.is_last and trainer.request_stop is not None
    assert trainer.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "3", "the node's agent kills torchrun after 4 s"


def test_server_over_several_nodes_is_one_process_with_a_head(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "k")
    arguments = ["--inference-nodes", "2", "--inference-gpus", "4", "--inference.parallel.dp-local", "4"]
    config = spread_over_nodes(RLConfig.load([*ON_NODES, *THREE, *arguments, "--output-dir", str(tmp_path)]))
    assert config.orchestrator.client.urls == ["http://a:8000"]
    server, _, trainer = make_process_specs(config, RunPaths(tmp_path))
    words = list(server.argv)
    assert (server.name, words[words.index("--nodes") + 1]) == ("inference", "a,b")
    assert words[-1] == str(tmp_path / "configs/inference_{node_rank}.toml")
    assert trainer.argv[list(trainer.argv).index("--nodes") + 1] == "c"
    parts = [tomllib.loads((tmp_path / f"configs/inference_{rank}.toml").read_text())["parallel"] for rank in (0, 1)]
    assert [(part["dp"], part["dp_local"], part["address"]) for part in parts] == [(8, 4, "a")] * 2
    assert [(part["headless"], part["start_rank"]) for part in parts] == [(False, 0), (True, 4)]


@pytest.mark.parametrize(
    ("roles", "servers", "trainers"),
    [
        (["--inference-nodes", "2", "--trainer-nodes", "2"], ["a", "b"], "b,c"),
        (["--inference-nodes", "3", "--trainer-nodes", "3"], ["a", "b", "c"], "a,b,c"),
        (["--inference-nodes", "1", "--trainer-nodes", "3"], ["a"], "a,b,c"),
    ],
)
def test_node_with_both_roles_divides_its_gpus(tmp_path, monkeypatch, roles, servers, trainers):
    monkeypatch.setenv(KEY, "k")
    arguments = [*ON_NODES, *THREE, *roles, "--inference-gpus", "3", "--trainer-gpus", "5"]
    config = spread_over_nodes(RLConfig.load([*arguments, "--output-dir", str(tmp_path)]))
    assert config.inference.gpu_memory_utilization == 0.9, "no GPU is shared"
    assert config.orchestrator.client.urls == [f"http://{node}:8000" for node in servers]
    *inference, _, trainer = make_process_specs(config, RunPaths(tmp_path))
    assert [spec.name for spec in inference] == [f"inference_{node}" for node in servers]
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in inference} == {"0,1,2"}
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == "3,4,5,6,7"
    words = list(trainer.argv)
    assert words[words.index("--nodes") + 1] == trainers
    assert {f"--nnodes={len(trainers.split(','))}", "--nproc-per-node=5", f"--master-addr={trainers[0]}"} <= set(words)
    with pytest.raises(ConfigError, match=r"trainer_gpu_ids = .* and a has 7|trainer_gpu_ids = .* and b has 7"):
        check_gpus_of_nodes(config, dict.fromkeys("abc", 7))


def test_node_with_both_roles_has_a_heartbeat_of_each(tmp_path):
    paths = RunPaths(tmp_path)
    for role, pid in ("inference_a", 1), ("trainer", 2):
        NodeHeartbeat(paths, "a", role).write(pid)
    found = read_heartbeats(paths).values()
    assert sorted((beat.role, beat.pid) for beat in found) == [("inference_a", 1), ("trainer", 2)]


def test_gpus_count_from_zero_on_each_node():
    config = RLConfig.load([*ON_NODES, *THREE, "--inference-gpus", "8", "--trainer-gpus", "8"])
    assert config.inference_gpu_ids == config.trainer_gpu_ids == list(range(8))
    assert config.inference.gpu_memory_utilization == 0.9, "no GPU is shared"
    assert RLConfig.load([*ON_NODES, *THREE]).trainer_gpu_ids == [0]
    assert RLConfig.load([*ON_NODES, "--slurm.nodes", "2", "--trainer-gpus", "2"]).trainer_gpu_ids == [0, 1]


@pytest.mark.parametrize("nodes", [["--slurm.nodes", "4"], ["--nodes", "a,b,c,d"], ["--nodes", "slurm"]])
def test_ranks_of_all_trainer_nodes_are_divided(nodes):
    config = RLConfig.load([*ON_NODES, *nodes, "--trainer-gpus", "8", "--trainer.model.dp-replicate", "3"])
    assert config.trainer.model.dp_replicate == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm.nodes", "4", "--trainer.model.dp-replicate", "2"], "dp_replicate 2 does not divide the 3 ranks"),
        ([*THREE, "--inference-nodes", "3"], "leaves none of the 3 nodes for the trainer"),
        ([*THREE, "--trainer-nodes", "4"], "trainer_nodes = 4, but there are 3 nodes"),
        ([*THREE, "--trainer-nodes", "1"], "inference_nodes = 1 and trainer_nodes = 1 are fewer than 3 nodes"),
        ([*THREE, "--trainer-nodes=3", "--inference-gpu-ids=0,1", "--trainer-gpu-ids=1,2"], "both name GPU 1, but no"),
        (["--slurm.nodes=2", "--slurm.inference-nodes=2", "--slurm.trainer-nodes=2", "--inference-gpu-ids=0",
          "--trainer-gpu-ids=0"], "both name GPU 0, but nodes have both roles"),
        (["--nodes", "a,-oProxyCommand=x"], "'-oProxyCommand=x' is not the name"),
        (["--nodes", "a,b,a"], "nodes names a twice"),
        (["--nodes", "a,b", "--bench"], "nodes cannot be combined with bench"),
        ([*THREE, "--inference.parallel.dp=3", "--inference.parallel.dp-local=1"], r"dp = 3 .* is not dp_local \* inf"),
        ([*THREE, "--inference.parallel.start-rank=1", "--inference.parallel.headless"], "headless"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_work_are_refused(arguments, message):
    with pytest.raises((ConfigError, ValidationError), match=message):
        RLConfig.load([*ON_NODES, *arguments])


def test_nodes_of_slurm_outside_of_a_job_are_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError, match="this is no Slurm job"):
        spread_over_nodes(RLConfig.load([*ON_NODES, "--nodes", "slurm"]))


def test_nodes_are_tried_before_the_start(start, tmp_path):
    ports = ["--inference.server.port", str(find_free_port()), "--rendezvous-port", str(find_free_port())]
    arguments = [*ON_NODES, *ports, "--output-dir", str(tmp_path)]
    found = check_nodes(RLConfig.load([*arguments, *THREE]))
    assert found == dict.fromkeys("abc", num_gpus())
    assert not list(tmp_path.glob(".nodes-*"))
    with pytest.raises(ConfigError, match="cannot be started on unknown by ssh: ssh: Could not resolve hostname"):
        check_nodes(RLConfig.load([*arguments, "--nodes", "a,unknown"]))


@pytest.mark.parametrize(
    ("option", "place"),
    [("--inference.server.port", "on a"), ("--rendezvous-port", "on c"), ("--inference.parallel.rpc-port", "on a")],
)
def test_port_in_use_on_a_node_is_refused(start, tmp_path, option, place):
    spans = ["--inference.parallel.dp-local", "1"] if "rpc" in option else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--inference.server.port": find_free_port(), "--rendezvous-port": find_free_port(), option: port}
        given = [text for pair in ports.items() for text in map(str, pair)]
        arguments = [*ON_NODES, *THREE, "--inference-nodes", "2", *spans, *given]
        config = RLConfig.load([*arguments, "--output-dir", str(tmp_path)])
        with pytest.raises(ConfigError, match=f"^nodes: {place}, port {port} on 0.0.0.0 is in use; .* {option}"):
            check_nodes(config)


@pytest.mark.parametrize(
    ("num_gpus", "message"),
    [
        ({"a": 0, "b": 0, "c": 0}, None),
        ({"a": 2, "b": 4, "c": 4}, None),
        ({"a": 2, "b": 4, "c": 3}, r"trainer_gpu_ids = \[0, 1, 2, 3\] counts from 0 on each node, and c has 3 GPU"),
        ({"a": 1, "b": 4, "c": 4}, r"inference_gpu_ids = \[0, 1\] counts from 0 on each node, and a has 1 GPU"),
        ({"a": 2, "b": 4, "c": 0}, r"c has 0 GPU"),
    ],
)
def test_gpus_that_a_node_does_not_have_are_refused(num_gpus, message):
    config = RLConfig.load([*ON_NODES, *THREE, "--inference-gpus", "2", "--trainer-gpus", "4"])
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_gpus_of_nodes(config, num_gpus)
