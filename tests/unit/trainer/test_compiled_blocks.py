"""`model.compile` on CUDA: each block, and the functions of the output head, become graphs without breaks.

Tensors are fake CUDA tensors, so that the branches for a GPU are traced; no kernel is generated.
"""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen  # registers the kernel of packed rows
import transformers
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama import modeling_llama

from prime_rl.configs.training.model import ActivationCheckpointConfig, CompileConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.memory_savings import prepare_blocks
from prime_rl.trainer.model import lm_head, varlen_attention
from prime_rl.trainer.model.lm_head import SamplingMask, token_logprobs
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.weights.policy_loading import fuse_kernels, load_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_policy_model import ARCHITECTURES, SMALL

pytestmark = pytest.mark.extended


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "mode", "kinds"),
    [
        ("qwen3", "selective", 1),
        ("qwen3_moe", "full", 1),
        ("mistral_window", None, 1),
        pytest.param("deepseek_v3", "full", 2, marks=pytest.mark.release),  # dense and experts
        pytest.param("gpt_oss_sinks_window", "selective", 2, marks=pytest.mark.release),  # full and windowed
    ],
)
def test_blocks_are_one_graph_for_all_lengths(name, mode, kinds, monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
    text = ARCHITECTURES[name]()
    ac = None if mode is None else ActivationCheckpointConfig(mode=mode)
    with FakeTensorMode(allow_non_fake_inputs=True):
        options = {"dtype": torch.bfloat16, "attn_implementation": varlen_attention.implementation("auto")}
        with torch.device("cuda"):
            policy = PolicyModel(transformers.AutoModelForCausalLM.from_config(text, **options).eval())
        prepare_blocks(policy, TrainerModelConfig(name="model", compile=CompileConfig(fullgraph=True), ac=ac))
        for length in (24, 60, 31, 47):
            bounds = torch.tensor([0, 9, length], dtype=torch.int32, device="cuda")
            packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            packed |= {"max_length_q": length - 9, "max_length_k": length - 9}
            embedded = torch.empty(1, length, text.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            states = policy.causal_lm.base_model(
                inputs_embeds=embedded,
                position_ids=torch.zeros(1, length, dtype=torch.int64, device="cuda"),
                attention_mask=None,
                use_cache=False,
                **packed,
            ).last_hidden_state
            assert states.device.type == "cuda" and states.dtype == torch.bfloat16
    assert counter.frame_count == 2 * kinds, "one graph for the first length, and one for all others"


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_output_head_is_compiled_a_few_times_for_all_lengths_and_masks(softcap, monkeypatch):
    """Beyond torch's limit of 8 it would run uncompiled, with four times the memory."""
    counters = {name: CompileCounter() for name in ("_score", "_slope", "_cap")}
    expected = [_score_tokens(*case, softcap) for case in _CASES]
    for name, counter in counters.items():
        compiled = torch.compile(getattr(lm_head, name), backend=counter, fullgraph=True, dynamic=True)
        monkeypatch.setattr(lm_head, name, compiled)
    for case, wanted in zip(_CASES, expected, strict=True):
        torch.testing.assert_close(_score_tokens(*case, softcap), wanted)
    assert all(counter.frame_count <= 8 for counter in counters.values())


_CASES = [(n, masked) for n in (1, 2, 5, 64, 100, 130, 257, 1, 300, 77) for masked in (False, True)]


def _score_tokens(count, masked, softcap):
    generator = torch.Generator().manual_seed(count)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (count, 192))
    targets, temperature = torch.arange(count) % 192, torch.ones(count)
    mask = SamplingMask(torch.full((count,), 5), temperature * 0.9, temperature * 0) if masked else None
    logprobs, *_ = token_logprobs(hidden, weight, targets, temperature, 64, mask, softcap)
    logprobs.sum().backward()
    return logprobs.detach(), hidden.grad, weight.grad


# Fused kernels change one model only; unsupported ones raise one line


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
    other = llama()
    fuse_kernels(other, TrainerModelConfig(impl="auto"), CUDA)
    assert "forward" not in vars(other.model.norm)


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
