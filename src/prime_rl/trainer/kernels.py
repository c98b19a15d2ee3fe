"""Fused kernels for norms and gated MLPs: they save memory traffic on CUDA and are never needed.

Checked against liger-kernel 0.8.5, whose functions for a kind of model also replace names in transformers' module of
that kind, for every model of the process: these are put back, so that only the one model is changed. Its rotary
embedding can only be replaced for all and its losses are not used (the output head is ours), so both stay out.
tests/unit/trainer/test_kernels.py fails without that.
"""

import inspect
import sys

import torch
from transformers import PreTrainedModel

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError


def fuse_kernels(causal_lm: PreTrainedModel, config: TrainerModelConfig, device: torch.device) -> None:
    """Replace the forward of norms and dense MLPs by fused kernels if `config.impl` asks for them; names stay.

    Args:
        causal_lm: on the meta device or not; without adapters.
        config: `impl` auto and hf change nothing.
        device: where forward will run.

    Raises:
        ConfigError: they are asked for and there are none, for this device or this kind of model.
    """
    if config.impl != "liger_kernel":
        return
    way_out = "set model.impl to 'auto'"
    if device.type != "cuda":
        raise ConfigError(f"model.impl 'liger_kernel' runs on CUDA, not on {device.type}; {way_out}")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as APPLY
    except ImportError as error:
        raise ConfigError(f"model.impl 'liger_kernel': {error}; install with --extra liger, or {way_out}") from None
    kind = causal_lm.config.model_type
    if kind not in APPLY:
        raise ConfigError(f"model.impl 'liger_kernel' has no kernels for {kind} models; {way_out}")
    wanted = {"rms_norm": True, "layer_norm": True, "swiglu": not _is_mixture(causal_lm)}
    wanted["geglu"] = wanted["swiglu"]
    switches = inspect.signature(APPLY[kind]).parameters.keys() - {"model"}
    library = sys.modules[type(causal_lm).__module__]
    before = dict(vars(library))
    try:
        APPLY[kind](model=causal_lm, **{switch: wanted.get(switch, False) for switch in switches})
    finally:
        vars(library).update(before)


def _is_mixture(causal_lm: PreTrainedModel) -> bool:
    """Experts stay as they are: transformers runs them as grouped matrix products, and they are watched."""
    return any(parameter.ndim == 3 for parameter in causal_lm.parameters())
