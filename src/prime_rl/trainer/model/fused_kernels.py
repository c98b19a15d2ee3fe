"""Fused kernels of liger-kernel for norms and gated MLPs, which save memory traffic on CUDA.

Checked against liger-kernel 0.8.5 by tests/unit/trainer/test_fused_kernels.py. Its rotary embedding can only be
replaced for all models of the process, and the output head is our own, so neither is used.
"""

import inspect
import sys

import torch
from transformers import PreTrainedModel

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error


def fuse_kernels(causal_lm: PreTrainedModel, config: TrainerModelConfig, device: torch.device) -> None:
    """Replace the forward of norms and dense MLPs by fused kernels if `config.impl` is "liger_kernel".

    The model has no adapters yet; it may be on the meta device. `device` is that of the forward pass. Raises
    ConfigError if there are no kernels for this device or this kind of model.
    """
    if config.impl != "liger_kernel":
        return
    fix = "set model.impl to 'auto'"
    if device.type != "cuda":
        raise ConfigError(f"model.impl 'liger_kernel' runs on CUDA, not on {device.type}; {fix}")
    missing = "model.impl 'liger_kernel': {}; install with --extra liger, or " + fix
    with translate_error(ImportError, lambda error: ConfigError(missing.format(error))):
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as APPLY
    kind = causal_lm.config.model_type
    if kind not in APPLY:
        raise ConfigError(f"model.impl 'liger_kernel' has no kernels for {kind} models; {fix}")
    # Experts keep the forward of transformers: it is fast and is monitored.
    is_dense = all(parameter.ndim < 3 for parameter in causal_lm.parameters())
    wanted = {"rms_norm": True, "layer_norm": True, "swiglu": is_dense, "geglu": is_dense}
    switches = inspect.signature(APPLY[kind]).parameters.keys() - {"model"}
    # liger replaces names in transformers' module as well, for every model of the process; restore them.
    library = sys.modules[type(causal_lm).__module__]
    before = dict(vars(library))
    try:
        APPLY[kind](model=causal_lm, **{switch: wanted.get(switch, False) for switch in switches})
    finally:
        vars(library).update(before)
