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
from prime_rl.supervisor.nodes import node_agent, node_launcher
from prime_rl.supervisor.nodes.node_launcher import RemoteOptions, make_script, remote_command, run_on_nodes
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
SLEEPS = "import subprocess, sys; subprocess.Popen(['sleep', '300'], start_new_session=True).wait()"


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Use the script; connect again at once, and send a line twenty times a second."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PRIME_RL_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.chdir(tmp_path)
    for name in ("_RECONNECT_SECONDS", "PING_SECONDS"):
        monkeypatch.setattr(node_launcher, name, 0.05)


def on_nodes(directory, program, nodes="n1,n2", silence=60.0):
    """Return how and what to run: a Python program, whose argument is the rank of its node."""
    options = RemoteOptions("ssh", nodes.split(","), "trainer", directory, 5.0, silence)
    return options, [sys.executable, "-c", program, "{node_rank}"]


@pytest.fixture
def run(ssh, tmp_path, capfd):
    """Run a Python program on nodes; return its exit code, output, and the arguments of each ssh."""

    async def run(*arguments):
        code = await asyncio.wait_for(run_on_nodes(*on_nodes(tmp_path, *arguments)), PROGRESS_TIMEOUT_SECONDS)
        return code, capfd.readouterr().err, (tmp_path / "calls").read_text()

    return run


async def test_command_runs_on_each_node_with_the_environment_that_no_command_line_shows(run, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, secret := "it's secret\n$HOME")
    program = (  # one write, because the lines of the nodes are not ordered
        f"import os, sys; key = os.environ['{KEY}']; words = sys.argv[1], os.environ['PRIME_RL_NODE'], "
        "str(key == sys.stdin.read() or repr(key)), os.getcwd(); os.write(1, ' '.join(words).encode() + b'\\n')"
    )
    code, output, calls = await run(program)
    assert code == 0, output
    place = os.path.realpath(tmp_path)
    assert sorted(output.splitlines()) == [f"{rank} n{rank + 1} {secret!r} {place}" for rank in (0, 1)]
    assert sorted(calls.splitlines()) == ["n1 bash -s", "n2 bash -s"]


async def test_failure_on_one_node_ends_the_command_on_all_and_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(node_launcher, "_SIBLING_SECONDS", 0.1)
    status, output, _ = await run(
        "import sys, time; sys.exit(3) if sys.argv[1] == '1' else time.sleep(300)",
    )
    message = "the command on n2 exited with code 3"
    assert status == 3 and message in output
    assert json.loads((tmp_path / "error.json").read_text())["message"] == message


async def test_killed_command_is_named_instead_of_one_that_failed_because_of_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr(node_launcher, "_SIBLING_SECONDS", 600.0)
    effect = "[open('failed', 'w'), sys.exit(1)]"
    cause = "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('failed'), True)] + [os.kill(os.getpid(), 9)]"
    code, *_ = await run(f"import os, sys, time; {cause} if sys.argv[1] == '1' else {effect}")
    assert code == 137
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "the command on n2 was killed by SIGKILL"


async def test_node_that_cannot_be_reached_ends_the_command(run):
    code, output, _ = await run("import time; time.sleep(300)", "unknown", 0.1)
    assert code == 1
    assert "Could not resolve hostname unknown" in output
    assert "ssh cannot start the command on unknown" in output


async def test_node_that_can_be_reached_only_later_runs_the_command(run):
    code, output, calls = await run("print('works')", "late")
    assert (code, output) == (0, "works\n")
    assert calls.splitlines() == ["late bash -s"] * 2


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_launcher_leaves_no_process_on_the_nodes(ssh, tmp_path, number):
    program = f"open(f'started{{__import__(\"sys\").argv[1]}}', 'w'); {SLEEPS}"
    process = subprocess.Popen(remote_command(*on_nodes(tmp_path, program)))
    until(lambda: len(list(tmp_path.glob("started*"))) == 2, "the command")
    children = psutil.Process(process.pid).children
    until(lambda: sum("sleep" in c.name() for c in children(recursive=True)) == 2, "its processes")
    there = children(recursive=True)
    process.send_signal(number)
    assert process.wait(PROGRESS_TIMEOUT_SECONDS) == (128 + number if number == signal.SIGTERM else -number)
    until(lambda: not any(map(alive, there)), "the end")


async def test_node_that_answers_has_a_heartbeat(ssh, tmp_path):
    running = asyncio.ensure_future(run_on_nodes(*on_nodes(tmp_path, SLEEPS, "n1")))
    beats = []
    async with asyncio.timeout(PROGRESS_TIMEOUT_SECONDS):
        while len(beats) < 2:
            await asyncio.sleep(0.02)
            beat = read_heartbeats(RunPaths(tmp_path)).get("node_n1")
            if beat is not None and (not beats or beat.beat > beats[-1].beat):
                beats.append(beat)
    assert (beats[0].host, beats[0].role, beats[0].boot_id) == ("n1", "trainer", "")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_agent_kills_its_command_after_silence():
    command = [sys.executable, "-m", "prime_rl.supervisor.nodes.node_agent", "0.4", "5", sys.executable, "-c", SLEEPS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.stdout.read(), process.wait(PROGRESS_TIMEOUT_SECONDS)
    assert process.returncode == 137
    assert output.splitlines()[-2:] == ["prime_rl.node silent", "prime_rl.node ended -9"]


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


@pytest.fixture
def spread(tmp_path, monkeypatch):
    """Return the configuration of a run on three nodes, and its process specs."""
    monkeypatch.setenv(KEY, "")

    def spread(*arguments):
        config = RLConfig.load([*ON_NODES, *THREE, *arguments, "--output-dir", str(tmp_path)])
        config = spread_over_nodes(config)
        return config, make_process_specs(config, RunPaths(tmp_path))

    return spread


def test_spread_over_nodes_places_servers_and_ranks(spread):
    config, (server, orchestrator, trainer) = spread("--trainer-gpu-ids", "0,1", "--ckpt")
    assert config.orchestrator.client.urls == ["http://a:8000"]
    assert config.inference.server.host == "0.0.0.0"
    assert len(os.environ[KEY]) == 32
    assert server.name == "inference_a" and not server.must_finish
    assert list(server.argv[2:7]) == ["prime_rl.supervisor.nodes.node_launcher", "--launcher", "ssh", "--nodes", "a"]
    assert "prime_rl.supervisor.nodes.node_launcher" not in orchestrator.argv
    words = list(trainer.argv)
    assert words[words.index("--nodes") + 1] == "b,c"
    assert {"--nnodes=2", "--node-rank={node_rank}", "--nproc-per-node=2", "--master-addr=b"} <= set(words)
    assert trainer.is_last and trainer.request_stop is not None
    assert trainer.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "3", "the node's agent kills torchrun after 4 s"


def test_server_over_several_nodes_is_one_process_with_a_head(spread, tmp_path):
    arguments = ["--inference-nodes", "2", "--inference-gpus", "4", "--inference.parallel.dp-local", "4"]
    config, (server, _, trainer) = spread(*arguments)
    assert config.orchestrator.client.urls == ["http://a:8000"]
    words = list(server.argv)
    assert (server.name, words[words.index("--nodes") + 1]) == ("inference", "a,b")
    assert words[-1] == str(tmp_path / "configs/inference_{node_rank}.toml")
    assert trainer.argv[list(trainer.argv).index("--nodes") + 1] == "c"
    parts = [tomllib.loads((tmp_path / f"configs/inference_{rank}.toml").read_text())["parallel"] for rank in (0, 1)]
    assert [(part["dp"], part["dp_local"], part["address"]) for part in parts] == [(8, 4, "a")] * 2
    assert [(part["headless"], part["start_rank"]) for part in parts] == [(False, 0), (True, 4)]


@pytest.mark.parametrize(
    ("num_inference", "num_trainer", "servers", "trainers"), [(2, 2, ["a", "b"], "b,c"), (1, 3, ["a"], "a,b,c")]
)
def test_node_with_both_roles_divides_its_gpus(spread, num_inference, num_trainer, servers, trainers):
    roles = [f"--inference-nodes={num_inference}", f"--trainer-nodes={num_trainer}"]
    config, (*inference, _, trainer) = spread(*roles, "--inference-gpus", "3", "--trainer-gpus", "5")
    assert config.inference.gpu_memory_utilization == 0.9, "no GPU is shared"
    assert config.orchestrator.client.urls == [f"http://{node}:8000" for node in servers]
    assert [spec.name for spec in inference] == [f"inference_{node}" for node in servers]
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in inference} == {"0,1,2"}
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == "3,4,5,6,7"
    words = list(trainer.argv)
    assert words[words.index("--nodes") + 1] == trainers
    assert {f"--nnodes={num_trainer}", "--nproc-per-node=5", f"--master-addr={trainers[0]}"} <= set(words)
    with pytest.raises(ConfigError, match=r"trainer_gpu_ids = .* and [ab] has 7"):
        check_gpus_of_nodes(config, dict.fromkeys("abc", 7))


def test_gpus_count_from_zero_on_each_node_and_ranks_of_all_nodes_are_divided():
    config = RLConfig.load([*ON_NODES, *THREE, "--inference-gpus", "8", "--trainer-gpus", "8"])
    assert config.inference_gpu_ids == config.trainer_gpu_ids == list(range(8))
    assert config.inference.gpu_memory_utilization == 0.9, "no GPU is shared"
    assert RLConfig.load([*ON_NODES, *THREE]).trainer_gpu_ids == [0]
    assert RLConfig.load([*ON_NODES, "--slurm.nodes", "2", "--trainer-gpus", "2"]).trainer_gpu_ids == [0, 1]
    for nodes in (["--slurm.nodes", "4"], ["--nodes", "a,b,c,d"], ["--nodes", "slurm"]):
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
        (["--nodes", "slurm"], "this is no Slurm job"),
        (["--nodes", "a,b", "--bench"], "nodes cannot be combined with bench"),
        ([*THREE, "--inference.parallel.dp=3", "--inference.parallel.dp-local=1"], r"dp = 3 .* is not dp_local \* inf"),
        ([*THREE, "--inference.parallel.start-rank=1", "--inference.parallel.headless"], "headless"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_work_are_refused(monkeypatch, arguments, message):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises((ConfigError, ValidationError), match=message):
        spread_over_nodes(RLConfig.load([*ON_NODES, *arguments]))


def test_nodes_are_tried_before_the_start(ssh, tmp_path):
    ports = ["--inference.server.port", str(find_free_port()), "--rendezvous-port", str(find_free_port())]
    arguments = [*ON_NODES, *ports, "--output-dir", str(tmp_path)]
    found = check_nodes(RLConfig.load([*arguments, *THREE]))
    assert found == dict.fromkeys("abc", num_gpus())
    assert not list(tmp_path.glob(".nodes-*"))
    with pytest.raises(ConfigError, match="cannot be started on unknown by ssh: ssh: Could not resolve hostname"):
        check_nodes(RLConfig.load([*arguments, "--nodes", "a,unknown"]))


@pytest.mark.extended(after=2)
@pytest.mark.parametrize(
    ("option", "place"),
    [("--inference.server.port", "on a"), ("--rendezvous-port", "on c"), ("--inference.parallel.rpc-port", "on a")],
)
def test_port_in_use_on_a_node_is_refused(ssh, tmp_path, option, place):
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


def test_node_with_both_roles_has_a_heartbeat_of_each(tmp_path):
    for role, pid in ("inference_a", 1), ("trainer", 2):
        NodeHeartbeat(RunPaths(tmp_path), "a", role).write(pid)
    found = read_heartbeats(RunPaths(tmp_path)).values()
    assert sorted((beat.role, beat.pid) for beat in found) == [("inference_a", 1), ("trainer", 2)]
