"""The three processes of a run: their commands, environments, files."""

import os
import sys
import uuid
from dataclasses import replace
from pathlib import Path

from prime_rl.configs.dump import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.errors import ERROR_FILE
from prime_rl.run.checkpoints import read_resume
from prime_rl.run.paths import RunPaths
from prime_rl.run.rewind import RESTART_VARIABLE, START_VARIABLE
from prime_rl.supervisor.checks import visible_gpus
from prime_rl.supervisor.children import Role
from prime_rl.supervisor.process import SUPERVISED

# Ranks that hang in a collective when another dies are killed so many seconds before the grace of `rl` itself is over.
_TORCHRUN_SOONER_S = 1


def make_roles(config: RLConfig, paths: RunPaths) -> list[Role]:
    """Write the configuration of each role and say how to start it; inference first, since it takes longest.

    Raises:
        ConfigError: the run directory cannot be written.
    """
    write_config(config, paths.run_toml)
    write_config(config.trainer, paths.config("trainer"))
    write_config(config.orchestrator, paths.config("orchestrator"))
    start = {START_VARIABLE: uuid.uuid4().hex}
    roles = [_orchestrator(config, paths, start), _trainer(config, paths, start)]
    if config.inference is not None:
        write_config(config.inference, paths.config("inference"))
        roles.insert(0, _inference(config, paths))
    return roles


def _inference(config: RLConfig, paths: RunPaths) -> Role:
    argv = [sys.executable, "-m", "prime_rl.entrypoints.inference", "@", str(paths.config("inference"))]
    role = _role(config, paths, "inference", argv, _gpus(config.inference_gpu_ids))
    return replace(role, finishes=False)


def _orchestrator(config: RLConfig, paths: RunPaths, start: dict[str, str]) -> Role:
    """Once started again, it goes on from its ledger. It is called back if the trainer goes back after its end."""
    argv = [sys.executable, "-m", "prime_rl.entrypoints.orchestrator", "@", str(paths.config("orchestrator"))]
    role = _role(config, paths, "orchestrator", argv, start | {"CUDA_VISIBLE_DEVICES": ""})
    role = replace(role, recalled=lambda: _has_gone_back(config, paths))
    again = replace(role, argv=[*argv, "--restart"])  # and so each time
    return replace(role, again=lambda left: again)


def _trainer(config: RLConfig, paths: RunPaths, start: dict[str, str]) -> Role:
    """torchrun on a free port of this machine; each rank's output also goes to a file of its own.

    It starts the ranks again by itself when one dies, as long as restarts are left.
    """
    env = start | _gpus(config.trainer_gpu_ids)
    env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, int(config.grace_seconds) - _TORCHRUN_SOONER_S))}

    def make(left: int, restarted: bool) -> Role:
        argv = [sys.executable, "-m", "prime_rl.trainer.launch", "--standalone", f"--nproc-per-node={config.ranks}"]
        argv += [f"--max-restarts={left}", f"--log-dir={paths.torchrun_logs}", "--redirects=3", "--tee=3"]
        argv += ["-m", "prime_rl.trainer.rl.train", "@", str(paths.config("trainer"))]
        may = {RESTART_VARIABLE: "1" if restarted else "0"} if config.max_restarts else {}
        role = _role(config, paths, "trainer", argv, env | may)
        return replace(
            role,
            last=True,
            again=lambda left: make(left, restarted=True),
            restarted=lambda: _attempts(paths.torchrun_logs),
        )

    return make(config.max_restarts, restarted=False)


def _role(config: RLConfig, paths: RunPaths, name: str, argv: list[str], env: dict[str, str]) -> Role:
    whole = {**os.environ, **env, SUPERVISED: "1", ERROR_FILE: str(paths.error(name)), "PYTHONUNBUFFERED": "1"}
    return Role(name, argv, whole, paths.log(name), paths.error(name), restarts=config.max_restarts)


def _attempts(torchrun_logs: Path) -> int:
    """How often torchruns have started their ranks again: each time they open a folder for their output."""
    return sum(attempt.name != "attempt_0" for attempt in torchrun_logs.glob("*/attempt_*"))


def _has_gone_back(config: RLConfig, paths: RunPaths) -> bool:
    """Whether the trainer has gone back to a checkpoint since the orchestrator last began."""
    resume = read_resume(paths.root / config.ckpt.path if config.ckpt else paths.checkpoints_dir)
    branches = [int(file.stem.removeprefix("branch_")) for file in paths.ledger_dir.glob("branch_*.jsonl")]
    return resume is not None and resume.branch > max(branches, default=0)


def _gpus(ids: list[int]) -> dict[str, str]:
    """Ids count within what this process may see; without a GPU nothing is said."""
    visible = visible_gpus()
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] for gpu in ids)} if visible else {}
