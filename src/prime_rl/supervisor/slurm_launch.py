"""`rl --slurm`: writes a batch script for a run from the templates in deploy/slurm, and submits it."""

import shlex
import shutil
import subprocess
from pathlib import Path

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.slurm import SlurmConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.storage.file_locks import check_no_writer, hold_run_lock
from prime_rl.storage.model_files import check_model
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import find_earlier_run, undo_interrupted_move
from prime_rl.supervisor.input_check import InputCheck
from prime_rl.supervisor.preflight import check_copies_of_experts, check_resume, clear_run_directory

TEMPLATES = Path(__file__).parents[3] / "deploy" / "slurm"
_SUBMIT_TIMEOUT_SECONDS = 60


def submit_to_slurm(config: RLConfig) -> str:
    """Write the script and the configurations that it starts, and submit it; return a line that says what was done.

    Raises:
        ConfigError: bad input, or sbatch is missing.
        RunError: sbatch failed, or another job or process writes the run directory.
    """
    assert config.slurm is not None
    paths = config.run_paths
    if config.slurm.submit and shutil.which("sbatch") is None:
        raise ConfigError("slurm: sbatch is not installed here; submit from a login node, or set slurm.submit = false")
    if config.slurm.nodes > 1 and config.inference is None:
        raise ConfigError("slurm.nodes > 1 starts a server on each inference node: add --inference")
    if not TEMPLATES.is_dir():
        raise ConfigError(f"slurm: {TEMPLATES} does not exist; `rl --slurm` needs a checkout of prime-rl")
    for run in config.orchestrators.values():
        check_resume(run)
    check_model(config.trainer.model.name, not config.trainer.model.debug.random_init)
    check_copies_of_experts(config)
    with hold_run_lock(paths):
        undo_interrupted_move(paths)
        if config.slurm.nodes > 1:  # on one node, `rl` does it in the job
            if config.ckpt is None or config.ckpt.resume_step is None:  # else the job takes the run over
                check_no_writer(paths)
            if find_earlier_run(paths):
                with InputCheck() as check:
                    check.run(config)
            if (line := clear_run_directory(config, paths)) is not None:
                print(line)
        script = write_script(config, paths)
    if not config.slurm.submit:
        return f"wrote {script}"
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_SECONDS)
    if done.returncode:
        gpus = _gpus_per_node(config, config.slurm)
        raise RunError(
            f"sbatch {script} failed: {' '.join(done.stderr.split())}; the job asks for {config.slurm.nodes} node(s) "
            f"with {gpus} GPU(s) each (slurm.nodes, slurm.gpus_per_node)"
        )
    job = done.stdout.strip().partition(";")[0]  # the cluster's name may follow
    return f"submitted job {job}; script {script}, log {paths.logs_dir}/slurm-{job}.log"


def write_script(config: RLConfig, paths: RunPaths) -> Path:
    """Write configurations and script; return the script."""
    assert config.slurm is not None
    root = paths.root.absolute()
    own = config.model_copy(update={"slurm": None})
    exports = {"OUTPUT_DIR": str(root)}
    if config.slurm.nodes == 1 or config.inference is None:
        write_config(own, paths.config("rl"))
        template, arguments = "one_node.sbatch", [str(root / paths.config("rl").relative_to(paths.root))]
    else:
        write_config(own, paths.run_toml)
        for role in ("inference", "orchestrator", "trainer"):
            write_config(getattr(config, role), paths.config(role))
            exports[role.upper()] = str(root / "configs" / f"{role}.toml")
        exports["INFERENCE_NODES"] = str(config.slurm.inference_nodes)
        if config.slurm.trainer_nodes is not None:
            exports["TRAINER_NODES"] = str(config.slurm.trainer_nodes)
            for role in ("inference", "trainer"):
                exports[f"{role.upper()}_GPU_IDS"] = ",".join(map(str, getattr(config, f"{role}_gpu_ids")))
        exports["GPUS"] = str(config.ranks)
        exports["PORT"] = str(config.inference.server.port)
        template, arguments = "rl.sbatch", []
        if config.ckpt is not None and config.ckpt.resume_step is not None:
            exports["RESUME"] = "1"
    body = (TEMPLATES / template).read_text()
    kept = [line for line in body.splitlines() if not line.startswith(("#!", "#SBATCH"))]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in _options(config, config.slurm, root)), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += [f"set -- {shlex.join(arguments)}"] if arguments else []
    paths.logs_dir.mkdir(parents=True, exist_ok=True)  # Slurm does not create the folder of its log
    script = root / "slurm" / template
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("\n".join([*lines, *kept]) + "\n")
    return script


def _gpus_per_node(config: RLConfig, slurm: SlurmConfig) -> int:
    if slurm.gpus_per_node is not None:
        return slurm.gpus_per_node
    used = {*config.trainer_gpu_ids} if config.trainer.device != "cpu" else set()
    inference = {*config.inference_gpu_ids} if config.inference is not None else set()
    is_shared = slurm.nodes == 1 or slurm.trainer_nodes is not None
    return len(used | inference) if is_shared else max(len(used), len(inference))


def _options(config: RLConfig, slurm: SlurmConfig, root: Path) -> list[str]:
    """Options of sbatch: those of the template, then the configured ones."""
    given = {
        "job-name": config.exp_id or "prime-rl",
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": _gpus_per_node(config, slurm) or None,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "output": f"{root}/logs/slurm-%j.log",
        "open-mode": "append",
        "signal": "B:TERM@120",
    }
    options = [f"{name}={shlex.quote(str(value))}" for name, value in given.items() if value is not None]
    return [f"--{option}" for option in (*options, "exclusive", "requeue", *slurm.options)]
