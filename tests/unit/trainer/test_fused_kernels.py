"""Fused kernels change one model only; unsupported ones raise one line."""

import sys
from types import ModuleType

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.model.fused_kernels import fuse_kernels
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import SMALL

CUDA, FUSED = torch.device("cuda"), TrainerModelConfig(impl="liger_kernel")


def llama():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for liger that, like it, leaves its own classes behind in transformers' module."""
    calls = []

    def apply(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, model=None):
        calls.append({"rope": rope, "rms_norm": rms_norm, "swiglu": swiglu, "loss": fused_linear_cross_entropy})
        modeling_llama.LlamaRMSNorm = None
        model.model.norm.forward = lambda states: states

    library = ModuleType("liger_kernel.transformers.monkey_patch")
    library.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return calls


def test_fused_kernels_change_one_model_only(liger):
    model, names = llama(), [name for name, _ in llama().named_parameters()]
    norm = modeling_llama.LlamaRMSNorm
    fuse_kernels(model, FUSED, CUDA)
    assert liger == [{"rope": False, "rms_norm": True, "swiglu": True, "loss": False}]
    assert "forward" in vars(model.model.norm) and "forward" not in vars(llama().model.norm)
    assert modeling_llama.LlamaRMSNorm is norm
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_other_implementations_change_nothing(impl):
    model = llama()
    fuse_kernels(model, TrainerModelConfig(impl=impl), CUDA)
    assert "forward" not in vars(model.model.norm)


def refusal(model, device):
    with pytest.raises(ConfigError, match=r"model\.impl 'liger_kernel'.*set model\.impl to 'auto'") as caught:
        fuse_kernels(model, FUSED, device)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unsupported_kernels_raise_one_line(liger, monkeypatch, tmp_path):
    assert "not on cpu" in refusal(llama(), torch.device("cpu"))
    other = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL))
    assert "gpt_neox" in refusal(other, CUDA)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers")
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers.monkey_patch")
    assert "--extra liger" in refusal(llama(), CUDA)
    with pytest.raises(ConfigError, match="not on cpu"):
        load_policy(TrainerModelConfig(name=str(make_tiny_model(tmp_path)), impl="liger_kernel"), seed=0)
