"""Weights of a checkpoint as a Hugging Face model, by the same writer that publishes policy versions.

    uv run python -m prime_rl.trainer.export outputs/checkpoints/step_20 my-model --dtype bfloat16

Runs in one process on the CPU, whatever wrote the checkpoint. Of a run with LoRA the result is the base model with the
adapters merged into it, or, with `--adapter`, the adapters alone in peft's format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from pydantic import ValidationError

from prime_rl.configs.shared import LogConfig, TokenizerConfig
from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError, run_main
from prime_rl.run.artifact import ArtifactError, read_manifest
from prime_rl.run.checkpoints import PART_FORMAT, check_hashes, read_commit
from prime_rl.trainer.checkpoints import PART, load_model_and_optimizer
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.model import load_tokenizer
from prime_rl.trainer.parallel import join_world
from prime_rl.trainer.publication import Publisher
from prime_rl.trainer.start import start_process
from prime_rl.types import PolicyVersion

_DTYPES = ("float32", "bfloat16", "float16")
# All that says which model it is. How the run computed it (ranks, kernels, memory) is left at its default, as one
# process on a CPU would be refused much of that.
_OF_THE_MODEL = ("name", "trust_remote_code", "dtype", "lora", "debug")


def export(checkpoint: Path, target: Path, dtype: str, model: str | None = None, adapter: bool = False) -> None:
    """Write the weights of `checkpoint` to the directory `target`, which must not exist.

    Args:
        checkpoint: `checkpoints/step_N`; it must be complete, and its hashes must hold.
        target: a Hugging Face model directory, with tokenizer and manifest.
        dtype: of the written floating-point tensors.
        model: where the base model is now; None where the checkpoint says. Its config is always read, its weights
            matter where only adapters were trained.
        adapter: write the adapters alone.

    Raises:
        ConfigError: there is no such checkpoint, it has no adapters, or `target` exists.
        RunError: the checkpoint is damaged, or the disk is full.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another folder")
    try:
        commit = read_commit(checkpoint)
    except ArtifactError as error:
        raise ConfigError(f"{checkpoint} is no complete checkpoint: {error}") from None
    part = checkpoint / PART
    check_hashes(part)
    manifest = read_manifest(part, PART_FORMAT)
    config = model_config(manifest, model, adapter)
    with join_world("cpu", 60) as world:
        policy = make_policy(config, manifest["config"]["seed"], world)
        load_model_and_optimizer(part, policy, None)
        tokenizer = load_tokenizer(TokenizerConfig(**manifest["config"]["tokenizer"]), config)
        publisher = Publisher(policy, tokenizer, getattr(torch, dtype), world)
        publisher.publish(target, PolicyVersion(commit.branch, commit.step))
    logger.info(f"wrote {target}: step {commit.step} of branch {commit.branch} in {dtype}")


def model_config(manifest: dict[str, Any], model: str | None, adapter: bool) -> TrainerModelConfig:
    """Return the configuration of the model that a checkpoint was made with, for one process on a CPU.

    Raises:
        ConfigError: adapters are asked for and there are none, or another version of the program wrote it.
    """
    settings = manifest["config"]["model"]
    saved: dict[str, Any] = {key: settings[key] for key in _OF_THE_MODEL if key in settings}
    saved["name"] = model or saved["name"]
    if saved.get("lora"):
        on_cuda = manifest["device"] == "cuda" and saved["dtype"] == "auto"
        kept = "bfloat16" if on_cuda and saved["lora"]["base_dtype"] == "auto" else saved["lora"]["base_dtype"]
        saved["lora"] = {**saved["lora"], "base_dtype": kept, "publish": "adapter" if adapter else "merged"}
    elif adapter:
        raise ConfigError("--adapter: the checkpoint has none, all weights were trained; leave the flag out")
    try:
        return TrainerModelConfig(**saved)
    except ValidationError as error:
        raise ConfigError(f"the checkpoint's model settings are of another version: {error.errors()[0]}") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser("prime_rl.trainer.export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="checkpoints/step_N of a run")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (default: %(default)s)")
    parser.add_argument("--model", help="where the base model is, if it has moved")
    parser.add_argument("--adapter", action="store_true", help="LoRA: the adapters alone, in peft's format")
    arguments = parser.parse_args(argv)
    start_process(LogConfig())
    run_main(lambda: export(**vars(arguments)))


if __name__ == "__main__":
    main()
