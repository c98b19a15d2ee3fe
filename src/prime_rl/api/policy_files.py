"""The trained policy of a run as files: a Hugging Face model directory."""

import tempfile
from pathlib import Path
from typing import Any

from prime_rl.api.child_command import ChildCommand
from prime_rl.storage.paths import RunPaths


def export_policy(paths: RunPaths, target: Path, step: int = -1) -> Path:
    """Write a version of the policy to `target`, a Hugging Face model directory with its tokenizer, as `export` does.

    Args:
        paths: of the run, which may be running.
        target: must not exist.
        step: the version, which is the number of steps done; -1 is the newest.

    Raises:
        ConfigError: `target` exists, or the run has neither weights nor a checkpoint of this step.
        RunError: what should be exported is damaged.
    """
    chosen = [] if step == -1 else ["--step", str(step)]
    ChildCommand("export", [str(paths.root.absolute()), str(target), *chosen], paths).wait()
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
