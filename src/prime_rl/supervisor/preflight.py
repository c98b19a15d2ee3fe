"""Checks before any process starts; each problem is a one-line error."""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.configs.inference import ServerConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.api_key import read_api_key
from prime_rl.core.errors import ConfigError, translate_error, unwritable
from prime_rl.core.import_utils import require_packages
from prime_rl.core.loopback import is_loopback
from prime_rl.core.ports import check_port
from prime_rl.liveness.heartbeat_monitor import ENDED, FAILED, KernelState, read_heartbeats, read_kernel_state
from prime_rl.liveness.run_settings import MAX_RUNS
from prime_rl.monitors.loggers.metric_logger import check_loggers_installed
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.file_locks import check_no_writer
from prime_rl.storage.model_files import check_model, find_model, has_experts
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import find_earlier_run, move_earlier_run, remove_earlier_run, size_bytes
from prime_rl.supervisor.nodes.node_probe import num_gpus
from prime_rl.supervisor.nodes.placement import check_nodes

_WRITTEN = ("output_dir", "ckpt.path", "weight_broadcast.directory")
"""Keys of directories that a run writes."""


def check_before_start(config: RLConfig) -> None:
    """Check checkpoint, packages, libraries, models, API key, port and GPUs; raise ConfigError for a problem."""
    runs = config.orchestrators.values()
    for run in runs:
        check_resume(run)
    require_packages("torch", *(["vllm"] if config.inference is not None else []))
    check_loggers_installed(
        [*config.trainer.metric_loggers, *(logger for run in runs for logger in run.metric_loggers)]
    )
    check_model(config.trainer.model.name, not config.trainer.model.debug.random_init)
    for name in {config.model.name, *(run.model.name for run in runs)}:
        check_model(name, with_weights=False)
    check_copies_of_experts(config)
    if config.nodes:
        check_gpus_of_nodes(config, check_nodes(config))
        return
    if config.inference is not None:
        check_key(config.inference.server)
        check_port(config.inference.server.host, config.inference.server.port, "--inference.server.port")
    check_gpus(config, visible_gpus())


def check_copies_of_experts(config: RLConfig) -> None:
    """Reject the transport nccl to copies of a mixture of experts, which exchange tokens while they sample."""
    server = config.inference
    if server is None or server.parallel.dp == 1 or config.trainer.weight_broadcast.type != "nccl":
        return
    model = server.model
    directory = find_model(model.name, model.revision, model.download_timeout_seconds, with_weights=False)
    if has_experts(json.loads((directory / "config.json").read_text())):
        raise ConfigError(
            "trainer.weight_broadcast.type = 'nccl' is not supported with inference.parallel.dp = "
            f"{server.parallel.dp} for {model.name}, a mixture of experts: receiving a version beside the "
            "collectives of sampling may deadlock; use 'filesystem' with trainer.weight_broadcast.directory = "
            "/dev/shm/weights"
        )


def check_trainer_to_join(directory: Path) -> None:
    """Reject a directory without a running trainer of several runs."""
    found = read_heartbeats(RunPaths(directory), ("trainer",)).values()
    alive = [one for one in found if one.phase not in (ENDED, FAILED) and read_kernel_state(one) != KernelState.GONE]
    if not alive:
        raise ConfigError(f"join: no trainer runs in {directory}; start one with --trainer.max-concurrent-runs above 1")
    if alive[0].settings.get(MAX_RUNS, 1) == 1:
        raise ConfigError(f"join: {alive[0]} in {directory} has one run; start it with max_concurrent_runs above 1")


def check_resume(config: OrchestratorConfig) -> None:
    """Reject a missing or incomplete checkpoint, one after `max_steps`, and those of another run."""
    if config.ckpt is None:
        return
    step, directory = config.ckpt.resume_step, config.run_paths.root / config.ckpt.path
    found = find_checkpoints(directory)
    if step is None:
        if found.steps and not directory.is_relative_to(config.run_paths.root):
            raise ConfigError(
                f"ckpt.path: {directory} has checkpoints of an earlier run (steps {found.steps[0]} to "
                f"{found.steps[-1]}); resume the newest with --ckpt.resume-step -1, or choose another --ckpt.path"
            )
        return
    if step == -1:
        step = max(found.steps, default=0)
    elif step not in found.steps:
        why = found.broken.get(f"step_{step}")
        raise ConfigError(
            f"ckpt.resume_step = {step}: {directory} has no complete checkpoint of this step"
            f"{f' ({why})' if why else ''}; complete steps: {', '.join(map(str, found.steps)) or 'none'}"
        )
    if config.max_steps is not None and step > config.max_steps:
        raise ConfigError(
            f"max_steps = {config.max_steps}, but the checkpoint to resume from has completed {step} steps; increase "
            "--max-steps, or choose an earlier one with --ckpt.resume-step"
        )


def starts_without_checkpoint(config: OrchestratorConfig) -> bool:
    """Whether the latest checkpoint is to be resumed, and there is none."""
    if config.ckpt is None or config.ckpt.resume_step != -1:
        return False
    return not find_checkpoints(config.run_paths.root / config.ckpt.path).steps


def check_key(server: ServerConfig) -> None:
    """Reject a server that other machines can reach but that has no API key: it would reject admin requests."""
    if is_loopback(server.host) or read_api_key(server.api_key_var) is not None:
        return
    raise ConfigError(
        f"inference.server.host = {server.host} is reachable from other machines, so the server needs an API key: set "
        f"the environment variable {server.api_key_var}, or keep the host 127.0.0.1"
    )


def check_gpus(config: RLConfig, visible: list[str]) -> None:
    """Reject GPU ids that do not exist. Without any GPU the run uses the CPU and the ids have no effect."""
    if not visible:
        return
    trainer_ids = [] if config.trainer.device == "cpu" or config.join is not None else config.trainer_gpu_ids
    inference_ids = config.inference_gpu_ids if config.inference is not None else []
    for key, ids in (("trainer_gpu_ids", trainer_ids), ("inference_gpu_ids", inference_ids)):
        if missing := [gpu for gpu in ids if not 0 <= gpu < len(visible)]:
            raise ConfigError(
                f"{key} names GPU {missing[0]}, but {len(visible)} GPU(s) are visible (counted from 0); to share one: "
                "--trainer-gpu-ids 0 --inference-gpu-ids 0 --gpu-memory-utilization 0.5"
            )
    if trainer_ids:
        _check_ranks(config)


def check_gpus_of_nodes(config: RLConfig, num_gpus: Mapping[str, int]) -> None:
    """Reject GPU ids that a node does not have, unless no node of inference, or of the trainer, has GPUs."""
    trains_on_cpu = config.trainer.device == "cpu"
    for key, ids, nodes in (
        ("trainer_gpu_ids", [] if trains_on_cpu else config.trainer_gpu_ids, config.trainer_hosts),
        ("inference_gpu_ids", config.inference_gpu_ids, config.server_hosts),
    ):
        if not any(num_gpus[node] for node in nodes):
            continue
        if too_few := [node for node in nodes if not all(0 <= gpu < num_gpus[node] for gpu in ids)]:
            found = num_gpus[too_few[0]]
            raise ConfigError(
                f"{key} = {ids} counts from 0 on each node, and {too_few[0]} has {found} GPU(s); set ids that all "
                "nodes have, or remove the node from `nodes`"
            )
        if key == "trainer_gpu_ids":
            _check_ranks(config)


def _check_ranks(config: RLConfig) -> None:
    if config.trainer.device != "cpu" and config.ranks != len(config.trainer_gpu_ids):
        raise ConfigError(
            f"trainer_ranks = {config.ranks}, but trainer_gpu_ids has {len(config.trainer_gpu_ids)} ids; "
            "set one rank per GPU"
        )


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, in the form of CUDA_VISIBLE_DEVICES."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in given.split(",") if gpu.strip() not in ("", "-1")]
    return [str(index) for index in range(num_gpus())]


def gpus_that_are_not_there(config: RLConfig) -> str | None:
    """Return the GPU ids that are configured on a machine without a GPU, where the run uses the CPU."""
    given = {key: getattr(config, key) for key in ("trainer_gpu_ids", "inference_gpu_ids")}
    named = [f"{key} = {ids}" for key, ids in given.items() if ids != RLConfig.model_fields[key].default]
    return None if config.nodes or visible_gpus() or not named else ", ".join(named)


def unreachable_servers(config: RLConfig) -> Iterator[str]:
    """Yield the addresses of servers that the run expects but that do not accept connections."""
    if config.inference is not None:
        return
    for url in {url: None for run in config.orchestrators.values() for url in run.client.urls}:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=2).close()
        except OSError:
            yield url


def clear_run_directory(config: RLConfig, paths: RunPaths) -> str | None:
    """Move an earlier run to `earlier/`, or remove it with `clean`; return a line about it, None if there is none.

    A run that is resumed stays; of several runs, each one that is resumed and, with any of them, what they share and
    the runs that are not in the configuration, which may have joined.

    Raises:
        ConfigError: the run cannot be moved, this one reads from it, or a symbolic link is broken.
    """
    for entry in paths.root.iterdir() if paths.root.is_dir() else ():
        if entry.is_symlink() and not entry.exists() and not entry.name.startswith("."):  # an editor's lock file
            raise ConfigError(
                f"output_dir: {entry} is a symbolic link to {entry.readlink()}, which does not exist; create that "
                "directory or remove the link"
            )
    runs = config.orchestrators.values()
    resumed = [run.output_dir for run in runs if run.ckpt is not None and run.ckpt.resume_step is not None]
    entries = []
    if not resumed:
        entries = find_earlier_run(paths, paths.root / config.ckpt.path if config.ckpt is not None else None)
    if config.runs and config.join is None:
        folders = {file.parents[1] for file in paths.root.glob("run_*/configs/orchestrator.toml")}
        if resumed:
            folders &= {run.output_dir for run in runs}
        entries += sorted(folders - {*resumed})
        for folder in folders:
            check_no_writer(RunPaths(folder))
    if config.inference is None:  # a server without `rl` may write its files here
        entries = [entry for entry in entries if not fnmatch(entry.name, "inference*")]
    if not entries:
        return None
    check_not_read(config, entries)
    size = f"{size_bytes(entries) / 1e6:,.1f} MB"
    if config.clean:
        with translate_error(OSError, unwritable("clean: the earlier run cannot be removed")):
            remove_earlier_run(entries)
        return f"removed an earlier run ({size}) from {paths.root}"
    return f"moved an earlier run ({size}) to {move_earlier_run(paths, entries)}"


def check_not_read(config: RLConfig, entries: Sequence[Path]) -> None:
    """Reject a configuration that names a file of the earlier run, such as a model that it has trained."""
    written = [path.resolve() for path in entries]
    for key, value in _texts(config.model_dump()):
        path = Path(value.rpartition(":")[0] if ".py:" in value else value).expanduser().resolve()
        is_read = not key.endswith(_WRITTEN) and path.exists()
        if is_read and any(path.is_relative_to(entry) for entry in written):
            raise ConfigError(
                f"{key} = {value} belongs to the earlier run in output_dir, which would be moved; choose another "
                "--exp-id or --output-dir"
            )


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the strings and paths in nested values, with their keys."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str | Path):
        yield key, str(value)
