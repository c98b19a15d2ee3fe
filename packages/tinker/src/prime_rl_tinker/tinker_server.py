"""`tinker-server`: start the inference server, the trainer's ranks and the HTTP server for Tinker's SDK."""

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from prime_rl.configs.loading.base_config import write_config
from prime_rl.core.entry_point import ERROR_FILE, ArgumentParser, command
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.import_utils import require_packages
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.file_locks import hold_run_lock
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.child_processes import ProcessSpec
from prime_rl.supervisor.health_monitor import HealthMonitor
from prime_rl.supervisor.launch import explain
from prime_rl.supervisor.launch_specs import is_serving
from prime_rl.supervisor.lifecycle_events import EventLog
from prime_rl.supervisor.supervisor import SupervisorTimeouts, supervise
from prime_rl_tinker.checkpoint_store import CheckpointStore, UnknownPathError
from prime_rl_tinker.config import TinkerConfig

_MAX_RESTARTS = 3
"""Of the inference server, whose adapters are loaded again when they are used."""


@command
def main() -> None:
    """Serve until SIGINT or SIGTERM, or until a process fails; or export a checkpoint."""
    if sys.argv[1:2] == ["export"]:
        export(sys.argv[2:])
        return
    config = TinkerConfig.load()
    require_packages("torch", "vllm", "tinker")
    from prime_rl.storage.model_files import check_model, check_on_hub  # what follows is not needed by `--help`
    from prime_rl_tinker.api_main import read_key

    check_model(config.model.name)
    read_key(config)
    check_on_hub(config.model.name, config.model.revision)
    paths = config.run_paths
    with hold_run_lock(paths):
        for folder in (paths.heartbeats_dir, paths.logs_dir):
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier start
            folder.mkdir(parents=True)
        specs = _specs(config, paths)
        events = EventLog(paths.events, lambda text: print(text, flush=True))
        health = HealthMonitor(paths, config.inference.heartbeat.limits, events)
        print(f"starting at http://{config.server.host}:{config.server.port}", flush=True)
        outcome = asyncio.run(supervise(specs, SupervisorTimeouts(), events, health, keep_serving=True))
    if outcome.culprit is not None:
        raise explain(outcome, Console(highlight=False, markup=False))


def export(argv: Sequence[str]) -> None:
    """Write a checkpoint as an adapter in peft's format, or as a model with the adapter merged."""
    parser = ArgumentParser("tinker-server export", description=export.__doc__)
    parser.add_argument("path", help="tinker://MODEL/weights/NAME, or sampler_weights")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="of the server (default: outputs)")
    parser.add_argument("--merge", action="store_true", help="write the base model with the adapter merged into it")
    parser.add_argument("--model", help="path of the base model, if it has moved")
    arguments = parser.parse_args(argv)
    from prime_rl.entrypoints.delivery.policy_export import ExportForm, export_policy

    with translate_error(UnknownPathError, lambda error: ConfigError(f"{error} in {arguments.output_dir}")):
        _, folder = CheckpointStore(arguments.output_dir).find(arguments.path)
    export_policy(folder, arguments.target, form=ExportForm(adapter=not arguments.merge, model=arguments.model))


def _specs(config: TinkerConfig, paths: RunPaths) -> list[ProcessSpec]:
    write_config(config, paths.config("tinker"))
    write_config(config.served_model, paths.config("inference"))
    tinker = ["@", str(paths.config("tinker"))]
    launcher = ["prime_rl.trainer.torchrun", "--standalone", f"--nproc-per-node={config.ranks}", "-m"]
    inference = _spec(paths, "inference", ["prime_rl.entrypoints.inference", "@", str(paths.config("inference"))])
    inference = replace(inference, is_ready=lambda pid: is_serving(paths, pid), max_restarts=_MAX_RESTARTS)
    trainer = _spec(paths, "trainer", [*launcher, "prime_rl_tinker.trainer_main", *tinker])
    api = replace(_spec(paths, "api", ["prime_rl_tinker.api_main", *tinker]), start_after="inference")
    return [inference, trainer, api]


def _spec(paths: RunPaths, name: str, module: Sequence[str]) -> ProcessSpec:
    error = paths.error(name)
    env = {**os.environ, SUPERVISED: "1", ERROR_FILE: str(error), "PYTHONUNBUFFERED": "1"}
    return ProcessSpec(name, [sys.executable, "-m", *module], env, paths.log(name), error, must_finish=False)


if __name__ == "__main__":
    main()
