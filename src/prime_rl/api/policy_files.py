"""The trained policy of a run as files: a Hugging Face model directory."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from prime_rl.api.child_command import ChildCommand
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.weights.weight_retention import hold_version


def export_policy(paths: RunPaths, target: Path, step: int = -1) -> Path:
    """Write a version of the policy to `target`, a Hugging Face model directory with its tokenizer.

    Published weights are copied; else the checkpoint of the same step is exported, in float32.

    Args:
        paths: of the run, which may be running.
        target: must not exist.
        step: the version, which is the number of steps done; -1 is the newest.

    Raises:
        ConfigError: `target` exists, or the run has neither weights nor a checkpoint of this step.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another folder")
    weights = _complete_weights(paths)
    checkpoints = find_checkpoints(paths.checkpoints_dir).steps
    available = sorted({*weights, *checkpoints})
    if not available or (step != -1 and step not in available):
        wanted = "no trained weights" if step == -1 else f"no weights of step {step}"
        raise ConfigError(
            f"{paths.root} has {wanted}: a run keeps its newest weights/, and what --ckpt saves; available steps: "
            f"{', '.join(map(str, available)) or 'none'}"
        )
    chosen = available[-1] if step == -1 else step
    if chosen in weights:
        _copy(paths.weights(chosen), target)
    else:
        arguments = [str(paths.checkpoint(chosen)), str(target), "--dtype", "float32"]
        ChildCommand("prime_rl.trainer.export", arguments, paths).wait()
    return target


def load_policy(run_dir: str | Path, step: int = -1, device: str = "cpu") -> tuple[Any, Any]:
    """Load a version of a run's policy with transformers. Imports torch.

    Args:
        run_dir: the run directory.
        step: the version, which is the number of steps done; -1 is the newest.
        device: of the model, as torch names it.

    Returns:
        The `transformers` model, ready to generate, and its tokenizer.

    Raises:
        ConfigError: the run has neither weights nor a checkpoint of this step.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="prime_rl_policy_") as folder:
        directory = export_policy(RunPaths(Path(run_dir)), Path(folder) / "policy", step)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
        return model, AutoTokenizer.from_pretrained(directory)


def _complete_weights(paths: RunPaths) -> list[int]:
    """The steps of published versions that are whole models: neither deltas, nor adapters, nor sent by memory."""
    return [step for step in steps_in(paths.weights_dir) if _is_model(paths.weights(step))]


def _is_model(directory: Path) -> bool:
    try:
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
    except ArtifactError:  # incomplete, or being deleted
        return False
    files = {entry.name for entry in directory.iterdir()}
    return "config.json" in files and any(name.startswith("model") for name in files) and "delta" not in manifest


def _copy(source: Path, target: Path) -> None:
    failed = f"cannot copy {source} to {target}"
    with (
        translate_error(ArtifactError, lambda error: RunError(f"{failed}: {error}")),
        translate_error(OSError, lambda error: ConfigError(f"{failed}: {error.strerror or error}")),
        hold_version(source),
    ):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(MANIFEST))
