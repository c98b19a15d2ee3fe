"""What can be known to be wrong before anything is started, each as one line."""

import errno
import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.api_key import read_api_key
from prime_rl.configs.inference import ServerConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.errors import ConfigError
from prime_rl.run.checkpoints import find_checkpoints
from prime_rl.run.paths import RunPaths
from prime_rl.run.ports import claim_port


def check_before_start(config: RLConfig) -> None:
    """Check models, environments, packages, GPUs and the port.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    check_resume(config)
    _check_packages(config)
    for name in {config.trainer.model.name, config.orchestrator.model.name, config.model.name}:
        check_model(name)
    for index, env in enumerate(config.orchestrator.env):
        check_environment(env.id, f"orchestrator.env.{index}.id")
    if config.inference is not None:
        check_key(config.inference.server)
        check_port(config.inference.server.host, config.inference.server.port, "--inference.server.port")
    check_gpus(config, visible_gpus())


def check_resume(config: RLConfig) -> None:
    """Refuse to resume from a checkpoint that is not there, or not whole."""
    if config.ckpt is None or config.ckpt.resume_step in (None, -1):
        return
    step, directory = config.ckpt.resume_step, config.run_paths.root / config.ckpt.path
    found = find_checkpoints(directory)
    if step not in found.steps:
        why = found.broken.get(f"step_{step}")
        raise ConfigError(
            f"ckpt.resume_step = {step}: {directory} has no complete checkpoint of it{f' ({why})' if why else ''}; "
            f"complete are: {', '.join(map(str, found.steps)) or 'none'}"
        )


def check_model(name: str) -> None:
    """Refuse a name that can only be a local directory and is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.name = {name} is a directory without a config.json, so no model")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name = {name} does not exist (looked in {Path.cwd()})")


def check_environment(env_id: str, key: str) -> None:
    """Refuse an environment whose package is not installed."""
    module = env_id.split("/")[-1].replace("-", "_")
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{key} = {env_id} is not installed; run `uv pip install -e environments/{module}` for one of this "
            f"repository, `prime env install {env_id}` for one of the hub"
        )


def check_key(server: ServerConfig) -> None:
    """Refuse a server that other machines reach and nobody may steer, since it has no key."""
    if server.host in ("127.0.0.1", "localhost", "::1") or read_api_key(server.api_key_var) is not None:
        return
    raise ConfigError(
        f"inference.server.host = {server.host} lets other machines in, so the server needs a key: set the environment "
        f"variable {server.api_key_var}, or leave the host at 127.0.0.1"
    )


def check_port(host: str, port: int, flag: str) -> None:
    """Refuse a port that somebody listens on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            claim_port(port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with {flag}") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}; see {flag}") from None


def check_gpus(config: RLConfig, visible: list[str]) -> None:
    """Refuse GPU ids that are not there. Without any GPU everything runs on the CPU, and ids do not matter."""
    if not visible:
        return
    users = {"trainer_gpu_ids": [] if config.trainer.device == "cpu" else config.trainer_gpu_ids}
    if config.inference is not None:
        users["inference_gpu_ids"] = config.inference_gpu_ids
    for key, ids in users.items():
        missing = [gpu for gpu in ids if not 0 <= gpu < len(visible)]
        if missing:
            raise ConfigError(
                f"{key} names GPU {missing[0]}, but {len(visible)} GPU(s) are visible (counted from 0); to share one: "
                "--trainer-gpu-ids 0 --inference-gpu-ids 0 --gpu-memory-utilization 0.5"
            )
    if config.trainer.device != "cpu" and config.ranks != len(config.trainer_gpu_ids):
        raise ConfigError(
            f"trainer_ranks = {config.ranks} but trainer_gpu_ids has {len(config.trainer_gpu_ids)}; "
            "on GPUs there is one rank each"
        )


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu.strip() for gpu in given.split(",") if gpu.strip() not in ("", "-1")]
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def unreachable_servers(config: RLConfig) -> Iterator[str]:
    """Yield the addresses where a server is expected to run already and nobody listens."""
    if config.inference is not None:
        return
    for url in config.orchestrator.client.urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=2).close()
        except OSError:
            yield url


def clear_earlier_run(config: RLConfig, paths: RunPaths) -> list[Path]:
    """Make room in the run directory, unless this run resumes the earlier one.

    Rollouts, weights, ledger, spool, metrics, samples, events and logs are removed. Checkpoints are the only means of
    going on with the earlier run, so they are moved to `abandoned/`, never removed.

    Returns:
        What was removed or moved.

    Raises:
        ConfigError: there is an earlier run, and `clean` is false.
    """
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        return []
    removable = (
        paths.rollouts_dir,
        paths.weights_dir,
        paths.ledger_dir,
        paths.spool_dir,
        paths.metrics_dir,
        paths.samples_dir,
    )
    old = [path for path in (*removable, paths.checkpoints_dir) if path.is_dir() and any(path.iterdir())]
    if old and not config.clean:
        raise ConfigError(
            f"output_dir = {paths.root} holds {old[0].name}/ of an earlier run; choose another directory with --exp-id "
            "or --output-dir, or allow the removal with --clean"
        )
    for path in old:
        if path == paths.checkpoints_dir:
            target = paths.abandoned_dir / time.strftime("run_%Y%m%d_%H%M%S")
            target.mkdir(parents=True, exist_ok=True)
            path.rename(target / path.name)
        else:
            shutil.rmtree(path)
    shutil.rmtree(paths.torchrun_logs, ignore_errors=True)
    paths.events.unlink(missing_ok=True)
    return old


def _check_packages(config: RLConfig) -> None:
    wanted = ("torch", "vllm") if config.inference is not None else ("torch",)
    for package in wanted:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed; run `uv sync --extra cpu`, or `--extra gpu` for GPUs")
