"""Export the weights of a checkpoint as a Hugging Face model, in one process on the CPU.

    uv run python -m prime_rl.trainer.export outputs/checkpoints/step_20 my-model --dtype bfloat16

For a run with LoRA the result is the base model with merged adapters, or with `--adapter` the adapters in peft's
format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from pydantic import ValidationError

from prime_rl.configs.shared.blocks import LogConfig, TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import ArtifactError, read_manifest
from prime_rl.storage.checkpoint_artifacts import PART_FORMAT, check_hashes, read_commit
from prime_rl.trainer.checkpoints.checkpointer import PART
from prime_rl.trainer.checkpoints.dcp_reader import load_model_and_optimizer
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.process_setup import start_process
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import make_policy

_DTYPES = ("float32", "bfloat16", "float16")
# The settings that define the model. Others (ranks, kernels, memory) stay at their defaults, since many of them are not
# supported by one process on a CPU.
_MODEL_KEYS = ("name", "trust_remote_code", "dtype", "lora", "debug")


def export(checkpoint: Path, target: Path, dtype: str, model: str | None = None, adapter: bool = False) -> None:
    """Write the weights of `checkpoint` to `target`, a Hugging Face model directory with tokenizer and manifest.

    Args:
        checkpoint: `checkpoints/step_N`; it must be complete, with correct hashes.
        target: must not exist.
        dtype: of the written floating-point tensors.
        model: path of the base model; None takes the path in the checkpoint. Its weights are read only for adapters.
        adapter: write only the adapters.

    Raises:
        ConfigError: the checkpoint does not exist, it has no adapters, or `target` exists.
        RunError: the checkpoint is damaged, or the disk is full.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another folder")
    incomplete = f"{checkpoint} is not a complete checkpoint"
    with translate_error(ArtifactError, lambda error: ConfigError(f"{incomplete}: {error}")):
        commit = read_commit(checkpoint)
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
    """Return the configuration of a checkpoint's model, for one process on a CPU.

    Raises:
        ConfigError: there are no adapters for `adapter`, or another version of the program wrote the checkpoint.
    """
    settings = manifest["config"]["model"]
    saved: dict[str, Any] = {key: settings[key] for key in _MODEL_KEYS if key in settings}
    saved["name"] = model or saved["name"]
    saved |= {"seq_len": 1, "max_model_len": 1}  # no forward pass runs, so lengths do not matter
    if saved.get("lora"):
        on_cuda = manifest["device"] == "cuda" and saved["dtype"] == "auto"
        kept = "bfloat16" if on_cuda and saved["lora"]["base_dtype"] == "auto" else saved["lora"]["base_dtype"]
        saved["lora"] = {**saved["lora"], "base_dtype": kept, "publish": "adapter" if adapter else "merged"}
    elif adapter:
        raise ConfigError("--adapter: the checkpoint has no adapters, all weights were trained; omit the flag")
    problem = "the checkpoint's model settings were written by another version"
    with translate_error(ValidationError, lambda error: ConfigError(f"{problem}: {error.errors()[0]}")):
        return TrainerModelConfig(**saved)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser("prime_rl.trainer.export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="checkpoints/step_N of a run")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (default: %(default)s)")
    parser.add_argument("--model", help="path of the base model, if it has moved")
    parser.add_argument("--adapter", action="store_true", help="LoRA: export only the adapters, in peft's format")
    arguments = parser.parse_args(argv)
    start_process(LogConfig())
    run_main(lambda: export(**vars(arguments)))


if __name__ == "__main__":
    main()
