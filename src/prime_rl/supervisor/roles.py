"""The three processes of a run: their commands, environments, files."""

import os
import sys
import uuid

from prime_rl.configs.dump import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.errors import ERROR_FILE
from prime_rl.run.paths import RunPaths
from prime_rl.run.rewind import START_VARIABLE
from prime_rl.supervisor.checks import visible_gpus
from prime_rl.supervisor.children import Role
from prime_rl.supervisor.process import SUPERVISED

# Ranks that hang in a collective when another dies are killed after this many seconds, not torchrun's thirty.
_TORCHRUN_SHUTDOWN_S = 4


def make_roles(config: RLConfig, paths: RunPaths) -> list[Role]:
    """Write the configuration of each role and say how to start it; inference first, since it takes longest.

    Raises:
        ConfigError: the run directory cannot be written.
    """
    write_config(config, paths.run_toml)
    write_config(config.trainer, paths.config("trainer"))
    write_config(config.orchestrator, paths.config("orchestrator"))
    start = {START_VARIABLE: uuid.uuid4().hex}
    roles = [_orchestrator(paths, start), _trainer(config, paths, start)]
    if config.inference is not None:
        write_config(config.inference, paths.config("inference"))
        roles.insert(0, _inference(config, paths))
    return roles


def _inference(config: RLConfig, paths: RunPaths) -> Role:
    argv = [sys.executable, "-m", "prime_rl.entrypoints.inference", "@", str(paths.config("inference"))]
    return _role(paths, "inference", argv, _gpus(config.inference_gpu_ids), finishes=False)


def _orchestrator(paths: RunPaths, start: dict[str, str]) -> Role:
    argv = [sys.executable, "-m", "prime_rl.entrypoints.orchestrator", "@", str(paths.config("orchestrator"))]
    return _role(paths, "orchestrator", argv, start | {"CUDA_VISIBLE_DEVICES": ""})


def _trainer(config: RLConfig, paths: RunPaths, start: dict[str, str]) -> Role:
    """torchrun on a free port of this machine; each rank's output also goes to a file of its own."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.ranks}"]
    argv += [f"--log-dir={paths.torchrun_logs}", "--redirects=3", "--tee=3"]
    argv += ["-m", "prime_rl.trainer.rl.train", "@", str(paths.config("trainer"))]
    env = start | _gpus(config.trainer_gpu_ids) | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_TORCHRUN_SHUTDOWN_S)}
    return _role(paths, "trainer", argv, env, last=True)


def _role(
    paths: RunPaths, name: str, argv: list[str], env: dict[str, str], finishes: bool = True, last: bool = False
) -> Role:
    whole = {**os.environ, **env, SUPERVISED: "1", ERROR_FILE: str(paths.error(name)), "PYTHONUNBUFFERED": "1"}
    return Role(name, argv, whole, paths.log(name), paths.error(name), finishes, last)


def _gpus(ids: list[int]) -> dict[str, str]:
    """Ids count within what this process may see; without a GPU nothing is said."""
    visible = visible_gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] for gpu in ids)} if visible else {}
