"""Which node of a run over several nodes runs what, and whether the nodes can run it."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.api_key import read_api_key
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.ports import join_host_port
from prime_rl.liveness.parent_process import with_parent_death_signal
from prime_rl.supervisor.nodes.node_launcher import LAUNCHERS, make_script
from prime_rl.supervisor.nodes.node_probe import NOT_SHARED, PORT_IN_USE, REACHED

_TRY_SECONDS = 60
_PARALLEL = 16
"""Nodes that are tried at the same time."""


def slurm_nodes() -> list[str]:
    """Return the nodes of the Slurm job in which this process runs. Raises ConfigError outside of a job."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        raise ConfigError("nodes = slurm, but SLURM_JOB_NODELIST is not set: this is no Slurm job; name the nodes")
    done = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ConfigError(f"nodes = slurm: scontrol cannot expand {listed}: {done.stderr.strip()}")
    return done.stdout.split()


def spread_over_nodes(config: RLConfig) -> RLConfig:
    """Return the configuration with the nodes of the Slurm job, the addresses of the servers and an API key.

    The key is generated and put into the environment if it is not set. Raises ConfigError as `slurm_nodes`, or if no
    node is left for the trainer.
    """
    if not config.nodes or config.inference is None:
        return config
    from_slurm = config.nodes == ["slurm"]
    nodes = slurm_nodes() if from_slurm else config.nodes
    with translate_error(ValueError, lambda error: ConfigError(f"{error} ({', '.join(nodes)})")):
        config.model_copy(update={"nodes": nodes}).check_shared_nodes()
    server = config.inference.server.model_copy(update={"host": "0.0.0.0"})
    parallel = config.inference.parallel
    with_api = nodes[: 1 if parallel.spans_nodes else config.inference_nodes]
    urls = [f"http://{join_host_port(node, server.port)}/v1" for node in with_api]
    if parallel.spans_nodes:
        parallel = parallel.model_copy(update={"address": nodes[0]})
    if read_api_key(server.api_key_var) is None:
        os.environ[server.api_key_var] = secrets.token_hex(16)

    def connect(one: OrchestratorConfig) -> OrchestratorConfig:
        return one.model_copy(update={"client": one.client.model_copy(update={"base_url": urls})})

    return config.change_orchestrators(connect).model_copy(
        update={
            "nodes": nodes,
            "launcher": config.launcher or ("srun" if from_slurm else "ssh"),
            "inference": config.inference.model_copy(update={"server": server, "parallel": parallel}),
        }
    )


def check_nodes(config: RLConfig) -> dict[str, int]:
    """Try each node before anything starts; return the number of its GPUs.

    Raises:
        ConfigError: a command cannot be started there, does not find the program, finds another run directory, or finds
            a port in use.
    """
    launcher, root = config.launcher or "ssh", config.run_paths.root.absolute()
    if shutil.which(launcher) is None:
        raise ConfigError(f"nodes: {launcher} is not installed here")
    ports = _ports(config)
    with tempfile.NamedTemporaryFile(dir=root, prefix=".nodes-") as probe, ThreadPoolExecutor(_PARALLEL) as pool:
        program = [sys.executable, "-m", "prime_rl.supervisor.nodes.node_probe", probe.name]
        found = list(pool.map(lambda node: _try_node(launcher, node, [*program, *ports[node]]), config.nodes))
    if problems := [answer for answer in found if isinstance(answer, str)]:
        others = f" (and {len(problems) - 1} more of the nodes have problems)" if len(problems) > 1 else ""
        raise ConfigError(f"nodes: {problems[0]}{others}")
    return {node: answer for node, answer in zip(config.nodes, found, strict=True) if isinstance(answer, int)}


def _ports(config: RLConfig) -> dict[str, list[str]]:
    """Return the ports on which processes of each node will listen, each followed by its option."""
    assert config.inference is not None
    servers, parallel = config.server_hosts, config.inference.parallel
    ports: dict[str, list[str]] = {node: [] for node in config.nodes}
    for node in servers[: 1 if parallel.spans_nodes else None]:
        ports[node] += [str(config.inference.server.port), "--inference.server.port"]
    if parallel.spans_nodes:
        ports[servers[0]] += [str(parallel.rpc_port), "--inference.parallel.rpc-port"]
    ports[config.trainer_hosts[0]] += [str(config.rendezvous_port), "--rendezvous-port"]
    return ports


def _try_node(launcher: str, node: str, command: list[str]) -> str | int:
    """Return the number of GPUs of a node, or what is wrong with it."""
    argv = with_parent_death_signal([word.replace("{node}", node) for word in LAUNCHERS[launcher]])
    script = make_script(command, os.environ, Path.cwd(), node, 0)
    try:
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=_TRY_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{node} did not answer {launcher} within {_TRY_SECONDS:.0f} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    answers = [line.removeprefix(REACHED) for line in lines if line.startswith(REACHED)]
    if done.returncode == 0 and answers:
        return int(answers[0])
    reason = lines[-1] if lines else f"exit code {done.returncode}"
    said = done.stdout.strip().rpartition("\n")[2]  # stderr may have warnings of the shell
    if done.returncode == PORT_IN_USE:
        return f"on {node}, {said}"
    if done.returncode == NOT_SHARED:
        return f"{node} has another run directory: {said}; set --output-dir to a directory that all nodes share"
    if any("No such file or directory" in line for line in lines):
        return f"{node} has no such checkout: {reason}; `rl` needs it, with its Python, at the same path on all nodes"
    return f"a command cannot be started on {node} by {launcher}: {reason}"
