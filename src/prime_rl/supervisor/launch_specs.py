"""The processes of a run: their commands, environments and files."""

import json
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.entry_point import ERROR_FILE
from prime_rl.core.os_errors import wrap_os_errors
from prime_rl.liveness.heartbeat_monitor import (
    SERVING,
    HeartbeatMonitor,
    KernelState,
    LivenessReport,
    read_heartbeat,
    read_kernel_state,
)
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.checkpoint_artifacts import StopRecord, read_resume, write_stop
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import RESTART_VARIABLE, START_VARIABLE
from prime_rl.supervisor.child_processes import ProcessSpec
from prime_rl.supervisor.nodes.node_launcher import RemoteOptions, remote_command
from prime_rl.supervisor.preflight import visible_gpus

_TORCHRUN_MARGIN_SECONDS = 1
"""torchrun kills ranks that hang in a collective this long before `rl` kills torchrun."""

_NODE_MARGIN_SECONDS = 1
"""The processes of another node are killed this long before `rl` kills what started them."""

_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
"""glibc returns freed tensors to the kernel, which clears every page of the next ones: a tenth of a CPU trainer's time.

Environment variables of glibc, in bytes: the largest threshold for `mmap`, and how much freed memory a process keeps.
"""


def make_process_specs(config: RLConfig, paths: RunPaths) -> list[ProcessSpec]:
    """Write the configuration of each process and return its spec; inference first, because it takes longest to start.

    Raises:
        ConfigError: the run directory cannot be written.
    """
    write_config(config, paths.run_toml)
    start = {START_VARIABLE: uuid.uuid4().hex}
    orchestrators = []
    for name, orchestrator in config.orchestrators.items():
        write_config(orchestrator, paths.config(name))
        orchestrators.append(_orchestrator(config, paths, name, orchestrator, start))
    if config.join is not None:
        return orchestrators
    write_config(config.trainer, paths.config("trainer"))
    if config.inference is not None:
        write_config(config.inference, paths.config("inference"))
    if config.nodes:
        servers = _inference_on_nodes(config, paths)
        return [*servers, *orchestrators, _trainer_on_nodes(config, paths, start)]
    servers = [_inference(config, paths)] if config.inference is not None else []
    return [*servers, *orchestrators, _trainer(config, paths, start)]


def _inference_on_nodes(config: RLConfig, paths: RunPaths) -> list[ProcessSpec]:
    """A server on each inference node, or one over all of them, which `rl` starts and restarts on all together."""
    assert config.inference is not None
    nodes, parallel = config.server_hosts, config.inference.parallel
    groups = {f"inference_{node}": [node] for node in nodes}
    file = paths.config("inference")
    if parallel.spans_nodes:
        groups, file = {"inference": nodes}, paths.config("inference_{node_rank}")
        for rank in range(len(nodes)):
            own = {"start_rank": rank * parallel.copies_here, "headless": rank > 0}
            part = config.inference.model_copy(update={"parallel": parallel.model_copy(update=own)})
            write_config(part, paths.config(f"inference_{rank}"))
    argv = [sys.executable, "-m", "prime_rl.entrypoints.inference", "@", str(file.absolute())]
    env = _gpus_on_node(config.inference_gpu_ids)
    return [
        replace(_spec(config, paths, name, _on_nodes(config, paths, name, group, argv), env), must_finish=False)
        for name, group in groups.items()
    ]


def _on_nodes(config: RLConfig, paths: RunPaths, role: str, nodes: list[str], argv: list[str]) -> list[str]:
    grace = max(config.grace_timeout_seconds - _NODE_MARGIN_SECONDS, _NODE_MARGIN_SECONDS / 2)
    silence = config.heartbeat.dead_after_seconds
    return remote_command(RemoteOptions(config.launcher or "ssh", nodes, role, paths.root, grace, silence), argv)


def _trainer_on_nodes(config: RLConfig, paths: RunPaths, start: dict[str, str]) -> ProcessSpec:
    """torchrun on all nodes of the trainer. `rl` restarts all of them together."""
    nodes = config.trainer_hosts
    argv = [sys.executable, "-m", "prime_rl.trainer.torchrun", f"--nnodes={len(nodes)}", "--node-rank={node_rank}"]
    argv += [f"--nproc-per-node={config.ranks}", f"--master-addr={nodes[0]}"]
    argv += [f"--master-port={config.rendezvous_port}", f"--log-dir={paths.torchrun_logs.absolute()}"]
    argv += ["--redirects=3", "--tee=3", "-m", "prime_rl.trainer.rl.train"]
    argv += ["@", str(paths.config("trainer").absolute())]
    env = start | _gpus_on_node(config.trainer_gpu_ids)
    env |= _kill_hanging_ranks(config.grace_timeout_seconds - _NODE_MARGIN_SECONDS)

    def make(restarted: bool) -> ProcessSpec:
        restart = {RESTART_VARIABLE: "1" if restarted else "0"} if config.max_restarts else {}
        spec = _spec(config, paths, "trainer", _on_nodes(config, paths, "trainer", nodes, argv), env | restart)
        return replace(
            spec,
            is_last=True,
            request_stop=_stop_request(config, paths, start),
            in_use=_find_runs_of_others(config, paths),
            restart_spec=lambda left: make(restarted=True),
        )

    return make(restarted=False)


def _gpus_on_node(ids: list[int]) -> dict[str, str]:
    """Restrict a process on another node; a machine without GPUs ignores it."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))}


def _inference(config: RLConfig, paths: RunPaths) -> ProcessSpec:
    argv = [sys.executable, "-m", "prime_rl.entrypoints.inference", "@", str(paths.config("inference"))]
    spec = _spec(config, paths, "inference", argv, _gpus(config.inference_gpu_ids))
    spec = replace(spec, must_finish=False, is_ready=lambda pid: is_serving(paths, pid))
    if not shares_gpu(config):
        return spec
    paths.kv_cache.unlink(missing_ok=True)  # of an earlier run

    def with_same_memory(left: int) -> ProcessSpec:
        """Give a restarted server its previous KV cache size, which it cannot measure while a trainer uses the GPU.

        vLLM then uses `gpu_memory_utilization` only to reject a GPU with less free memory. The trainer may occupy that
        memory by now, so the value is too low to reject any GPU.
        """
        with suppress(OSError, ValueError, KeyError, TypeError):  # else it exited before measuring: no trainer started
            size = int(json.loads(paths.kv_cache.read_text())["bytes"])
            options = ["--vllm.kv-cache-memory-bytes", str(size), "--gpu-memory-utilization", "0.01"]
            return replace(spec, argv=[*argv, *options])
        return spec

    return replace(spec, restart_spec=with_same_memory)


def _orchestrator(
    config: RLConfig, paths: RunPaths, name: str, orchestrator: OrchestratorConfig, start: dict[str, str]
) -> ProcessSpec:
    """A restarted orchestrator resumes from its ledger. It runs again if the trainer rolls back after its exit.

    One of several runs starts and resumes like one without `rl`: other orchestrators of the trainer may start later.
    """
    argv = [sys.executable, "-m", "prime_rl.entrypoints.orchestrator", "@", str(paths.config(name))]
    run, ckpt = orchestrator.run_paths, orchestrator.ckpt
    spec = _spec(config, run, "orchestrator", argv, {"CUDA_VISIBLE_DEVICES": ""} | ({} if config.runs else start))
    if config.join is not None:  # the trainer is another user's: the orchestrator watches it
        spec = replace(spec, env={key: value for key, value in spec.env.items() if key != SUPERVISED})

    def has_rolled_back() -> bool:
        """Whether the trainer has rolled back to a checkpoint since the orchestrator started."""
        resume = read_resume(run.root / ckpt.path if ckpt else run.checkpoints_dir)
        branches = [int(file.stem.removeprefix("branch_")) for file in run.ledger_dir.glob("branch_*.jsonl")]
        return resume is not None and resume.branch > max(branches, default=0)

    def has_left() -> bool:
        """Whether the trainer has evicted the run, or somebody has removed it since the orchestrator started."""
        is_removed = not spec.log.exists() or (
            run.heartbeat("orchestrator").exists() and not run.config("orchestrator").exists()
        )
        return run.evicted.exists() or is_removed

    spec = replace(spec, name=name, needs_rerun=has_rolled_back)
    if config.runs:
        spec = replace(spec, fails_alone=True, is_over=has_left)
    restarted = replace(spec, argv=[*argv, "--restart"])
    return replace(spec, restart_spec=lambda left: restarted)


def _trainer(config: RLConfig, paths: RunPaths, start: dict[str, str]) -> ProcessSpec:
    """torchrun on a free port of this machine. It restarts the ranks itself while restarts are left."""
    logs, env = paths.torchrun_logs, start | _gpus(config.trainer_gpu_ids)
    env |= _kill_hanging_ranks(config.grace_timeout_seconds)

    def make(left: int, restarted: bool) -> ProcessSpec:
        argv = [sys.executable, "-m", "prime_rl.trainer.torchrun", "--standalone", f"--nproc-per-node={config.ranks}"]
        argv += [f"--max-restarts={left}", f"--log-dir={logs}", "--redirects=3", "--tee=3"]
        argv += ["-m", "prime_rl.trainer.rl.train", "@", str(paths.config("trainer"))]
        restart = {RESTART_VARIABLE: "1" if restarted else "0"} if config.max_restarts else {}
        return replace(
            _spec(config, paths, "trainer", argv, env | restart),
            is_last=True,
            start_after="inference" if shares_gpu(config) else None,
            restart_spec=lambda left: make(left, restarted=True),
            request_stop=_stop_request(config, paths, start),
            in_use=_find_runs_of_others(config, paths),
            # Each attempt of a torchrun has its own log folder.
            num_launcher_restarts=lambda: sum(log.name != "attempt_0" for log in logs.glob("*/attempt_*")),
        )

    return make(config.max_restarts, restarted=False)


def _kill_hanging_ranks(grace_seconds: float) -> dict[str, str]:
    """Have torchrun kill its ranks shortly before it is killed itself, instead of after 30 seconds."""
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, int(grace_seconds) - _TORCHRUN_MARGIN_SECONDS))}


def _stop_request(config: RLConfig, paths: RunPaths, start: dict[str, str]) -> Callable[[], None] | None:
    """Return what asks the trainer of this start to stop with a checkpoint; None for a single run without checkpoints.

    A trainer of several runs stops each with a checkpoint, also those that joined, which may have other settings. It
    raises RunError if the file cannot be written.
    """
    ckpt = config.orchestrator.ckpt
    if not config.runs and ckpt is None:
        return None
    directory = paths.checkpoints_dir if config.runs or ckpt is None else paths.root / ckpt.path

    def request_stop() -> None:
        with wrap_os_errors("ask the trainer for a checkpoint", directory):
            write_stop(directory, StopRecord(start=start[START_VARIABLE]))

    return request_stop


def _find_runs_of_others(config: RLConfig, paths: RunPaths) -> Callable[[], bool]:
    """Return a check, for repeated calls, whether an orchestrator that this `rl` has not started uses the trainer.

    `rl` asks it after its own orchestrators have exited: the user may have resumed a failed one, which still trains.
    """
    limits, monitors = config.heartbeat.limits, dict[str, HeartbeatMonitor]()

    def has_runs() -> bool:
        files = paths.root.glob("run_*/heartbeats/orchestrator.json")
        reports: list[LivenessReport] = []
        for folder in (file.parents[1] for file in files):
            monitor = HeartbeatMonitor(RunPaths(folder), limits, ("orchestrator",))
            reports += monitors.setdefault(folder.name, monitor).poll()
        return not all(report.is_lost(limits.dead_after_seconds) for report in reports)

    return has_runs


def _spec(config: RLConfig, paths: RunPaths, name: str, argv: list[str], env: dict[str, str]) -> ProcessSpec:
    env = {
        **_KEEP_FREED_MEMORY,
        **os.environ,
        **env,
        SUPERVISED: "1",
        ERROR_FILE: str(paths.error(name)),
        "PYTHONUNBUFFERED": "1",
    }
    return ProcessSpec(name, argv, env, paths.log(name), paths.error(name), max_restarts=config.max_restarts)


def shares_gpu(config: RLConfig) -> bool:
    """Whether the trainer and a server of this run use the same GPU.

    vLLM measures the free memory at its start and assumes that no other process allocates memory at that time.
    """
    if config.inference is None or config.trainer.device == "cpu" or not visible_gpus():
        return False
    return bool(set(config.inference_gpu_ids) & set(config.trainer_gpu_ids))


def is_serving(paths: RunPaths, pid: int) -> bool:
    """Whether the process `pid` on this host is an inference server that answers requests."""
    beat = read_heartbeat(paths.heartbeat("inference"))
    if beat is None or beat.pid != pid or beat.phase != SERVING:
        return False
    return read_kernel_state(beat) is KernelState.RUNNING


def _gpus(ids: list[int]) -> dict[str, str]:
    """Restrict a process to some of the visible GPUs; nothing on a machine without GPUs."""
    visible = visible_gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] for gpu in ids)} if visible else {}
