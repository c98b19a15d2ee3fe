"""Checks before any process starts; each problem is a one-line error."""

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.configs.inference import ServerConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.api_key import read_api_key
from prime_rl.core.errors import ConfigError
from prime_rl.core.import_utils import require_packages
from prime_rl.core.ports import check_port
from prime_rl.monitors.loggers.metric_logger import check_loggers_installed
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.earlier_run import clear_earlier_run, find_earlier_run
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.nodes.placement import check_nodes


def check_before_start(config: RLConfig) -> None:
    """Check checkpoint, packages, models, API key, port and GPUs; raise ConfigError for a problem."""
    check_resume(config)
    require_packages("torch", *(["vllm"] if config.inference is not None else []))
    check_loggers_installed([*config.trainer.metric_loggers, *config.orchestrator.metric_loggers])
    for name in {config.trainer.model.name, config.orchestrator.model.name, config.model.name}:
        check_model(name)
    if config.nodes:
        check_gpus_of_nodes(config, check_nodes(config))
        return
    if config.inference is not None:
        check_key(config.inference.server)
        check_port(config.inference.server.host, config.inference.server.port, "--inference.server.port")
    check_gpus(config, visible_gpus())


def check_resume(config: RLConfig) -> None:
    """Reject a missing or incomplete checkpoint."""
    if config.ckpt is None or config.ckpt.resume_step in (None, -1):
        return
    step, directory = config.ckpt.resume_step, config.run_paths.root / config.ckpt.path
    found = find_checkpoints(directory)
    if step not in found.steps:
        why = found.broken.get(f"step_{step}")
        raise ConfigError(
            f"ckpt.resume_step = {step}: {directory} has no complete checkpoint of this step"
            f"{f' ({why})' if why else ''}; complete steps: {', '.join(map(str, found.steps)) or 'none'}"
        )


def starts_without_checkpoint(config: RLConfig) -> bool:
    """Whether the latest checkpoint is to be resumed, and there is none."""
    if config.ckpt is None or config.ckpt.resume_step != -1:
        return False
    return not find_checkpoints(config.run_paths.root / config.ckpt.path).steps


def check_model(name: str) -> None:
    """Reject a local path that is not a model directory."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            if any(path.glob("model_*.pt")):
                raise ConfigError(
                    f"model.name = {name} is a checkpoint of nanochat; convert it to Hugging Face format with "
                    "convert_nanochat_checkpoints.py of the transformers repository"
                )
            raise ConfigError(f"model.name = {name} is not a model: the directory has no config.json")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name = {name} does not exist (looked in {Path.cwd()})")


def check_key(server: ServerConfig) -> None:
    """Reject a server that other machines can reach but that has no API key: it would reject admin requests."""
    if server.host in ("127.0.0.1", "localhost", "::1") or read_api_key(server.api_key_var) is not None:
        return
    raise ConfigError(
        f"inference.server.host = {server.host} is reachable from other machines, so the server needs an API key: set "
        f"the environment variable {server.api_key_var}, or keep the host 127.0.0.1"
    )


def check_gpus(config: RLConfig, visible: list[str]) -> None:
    """Reject GPU ids that do not exist. Without any GPU the run uses the CPU and the ids have no effect."""
    if not visible:
        return
    trainer_ids = [] if config.trainer.device == "cpu" else config.trainer_gpu_ids
    inference_ids = config.inference_gpu_ids if config.inference is not None else []
    for key, ids in (("trainer_gpu_ids", trainer_ids), ("inference_gpu_ids", inference_ids)):
        if missing := [gpu for gpu in ids if not 0 <= gpu < len(visible)]:
            raise ConfigError(
                f"{key} names GPU {missing[0]}, but {len(visible)} GPU(s) are visible (counted from 0); to share one: "
                "--trainer-gpu-ids 0 --inference-gpu-ids 0 --gpu-memory-utilization 0.5"
            )
    _check_ranks(config)


def check_gpus_of_nodes(config: RLConfig, num_gpus: Mapping[str, int]) -> None:
    """Reject GPU ids that a node does not have, unless no node of inference, or of the trainer, has GPUs."""
    trains_on_cpu, num_servers = config.trainer.device == "cpu", config.inference_nodes
    for key, ids, nodes in (
        ("trainer_gpu_ids", [] if trains_on_cpu else config.trainer_gpu_ids, config.nodes[num_servers:]),
        ("inference_gpu_ids", config.inference_gpu_ids, config.nodes[:num_servers]),
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
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def unreachable_servers(config: RLConfig) -> Iterator[str]:
    """Yield the addresses of servers that the run expects but that do not accept connections."""
    if config.inference is not None:
        return
    for url in config.orchestrator.client.urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=2).close()
        except OSError:
            yield url


def clear_run_directory(config: RLConfig, paths: RunPaths) -> list[Path]:
    """Remove an earlier run, unless this run resumes it; return what `clear_earlier_run` removed or moved.

    Raises:
        ConfigError: there is an earlier run and `clean` is false, or a symbolic link is broken.
    """
    for entry in paths.root.iterdir() if paths.root.is_dir() else ():
        if entry.is_symlink() and not entry.exists() and not entry.name.startswith("."):  # an editor's lock file
            raise ConfigError(
                f"output_dir: {entry} is a symbolic link to {entry.readlink()}, which does not exist; create that "
                "directory or remove the link"
            )
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        return []
    old = find_earlier_run(paths)
    if old and not config.clean:
        raise ConfigError(
            f"output_dir = {paths.root} contains {old[0].name}/ of an earlier run; choose another directory with "
            "--exp-id or --output-dir, or remove the earlier run with --clean"
        )
    return clear_earlier_run(paths)
