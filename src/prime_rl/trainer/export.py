"""Loads the weights of a checkpoint and publishes them as files, in one process on the CPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.logging import LogConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.logs import set_up_logging
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.checkpoint_artifacts import TRAINER, check_hashes

# The settings that define the model. Others (ranks, kernels, memory) stay at their defaults, since many of them are not
# supported by one process on a CPU.
_MODEL_KEYS = ("name", "revision", "trust_remote_code", "dtype", "lora", "debug")


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    version: PolicyVersion,
    manifest: Mapping[str, Any],
    dtype: str | None,
    model: str | None,
    adapter: bool,
) -> None:
    """Write the weights of `checkpoint` to the new `target`, a published version: model, tokenizer, manifest.

    Args:
        checkpoint: `checkpoints/step_N`, complete; the hashes of its files are checked.
        target: must not exist.
        version: of the weights.
        manifest: of the checkpoint's part of the trainer.
        dtype: of the written floating-point tensors; None is that of the run's published versions.
        model: path of the base model; None takes the path in the checkpoint. Its weights are read only for adapters.
        adapter: write only the adapters; otherwise they are merged.

    Raises:
        ConfigError: another version of the program wrote the checkpoint.
        RunError: the checkpoint is damaged, or the disk is full.
    """
    import torch

    from prime_rl.trainer.checkpoints.trainer_state import load_model_and_optimizer
    from prime_rl.trainer.fsdp import compute_dtype
    from prime_rl.trainer.model.policy_model import load_tokenizer
    from prime_rl.trainer.parallel.process_group import join_world
    from prime_rl.trainer.process_setup import limit_process
    from prime_rl.trainer.weight_sync.publisher import Publisher
    from prime_rl.trainer.weights.policy_loading import make_policy

    set_up_logging("warning", LogConfig().utc)
    limit_process()
    part = checkpoint / TRAINER
    check_hashes(part)
    config = model_config(manifest, model, adapter)
    settings = manifest["config"]
    published = settings.get("weights_dtype", settings.get("weight_broadcast", {}).get("dtype", "auto"))
    written = compute_dtype(dtype or published, torch.device(manifest["device"]))
    with join_world("cpu", 60) as world:
        policy = make_policy(config, settings["seed"], world)
        load_model_and_optimizer(part, policy, None)
        tokenizer = load_tokenizer(TokenizerConfig(**settings["tokenizer"]), config)
        Publisher(policy, tokenizer, written, world).publish(target, version)


def model_config(manifest: Mapping[str, Any], model: str | None, adapter: bool) -> TrainerModelConfig:
    """Return the configuration of a checkpoint's model, for one process on a CPU.

    Raises:
        ConfigError: another version of the program wrote the checkpoint.
    """
    settings = manifest["config"]["model"]
    saved: dict[str, Any] = {key: settings[key] for key in _MODEL_KEYS if key in settings}
    if model is not None:
        saved |= {"name": model, "revision": None}
    saved |= {"seq_len": 1, "max_model_len": 1}  # no forward pass runs, so lengths do not matter
    if saved.get("lora"):
        on_cuda = manifest["device"] == "cuda" and saved["dtype"] == "auto"
        kept = "bfloat16" if on_cuda and saved["lora"]["base_dtype"] == "auto" else saved["lora"]["base_dtype"]
        saved["lora"] = {**saved["lora"], "base_dtype": kept, "publish": "adapter" if adapter else "merged"}
    problem = "the checkpoint's model settings were written by another version"
    with translate_error(ValidationError, lambda error: ConfigError(f"{problem}: {error.errors()[0]}")):
        return TrainerModelConfig(**saved)
