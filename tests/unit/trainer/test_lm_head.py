"""The chunked log-probabilities against autograd over full logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prime_rl.configs.training.model import LoRAConfig
from prime_rl.trainer.model import lm_head
from prime_rl.trainer.model.lm_head import token_logprobs
from prime_rl.trainer.model.lora import LowRank
from prime_rl.trainer.model.policy_model import _head_logprobs


def full(hidden, weight, targets, temperature, softcap=None):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature[:, None]
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def make(n=37, width=16, vocabulary=101, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    temperature = 0.5 + torch.rand(n, generator=generator)
    return hidden, weight, targets, temperature


def check(leaves, doubles, case, softcap, chunk, tolerance, entropy_gradient=False):
    """Values and gradients in chunks are those of autograd over full logits, in double precision."""
    targets, temperature = case
    slopes = [torch.linspace(-2, 2, len(targets)).double(), torch.linspace(3, -1, len(targets)).double().sin()]
    expected, wanted_entropy = full(*doubles, targets, temperature, softcap)
    wanted = torch.autograd.grad(
        [expected, wanted_entropy][: 1 + entropy_gradient], doubles, slopes[: 1 + entropy_gradient]
    )
    device = leaves[0].device
    case = (targets.to(device), temperature.to(device))
    logprobs, entropy, _ = token_logprobs(*leaves, *case, chunk, softcap=softcap, entropy_gradient=entropy_gradient)
    assert logprobs.dtype == entropy.dtype == torch.float32 and entropy.requires_grad == entropy_gradient
    slopes = [slope.to(device, torch.float32) for slope in slopes]
    got = torch.autograd.grad([logprobs, entropy][: 1 + entropy_gradient], leaves, slopes[: 1 + entropy_gradient])
    torch.testing.assert_close(logprobs.cpu().double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.cpu().double(), wanted_entropy, rtol=0, atol=tolerance)
    half = leaves[0].dtype == torch.bfloat16
    for leaf, slope, wanted_slope in zip(leaves, got, wanted, strict=True):
        assert slope.dtype == leaf.dtype
        torch.testing.assert_close(
            slope.cpu().double(), wanted_slope, rtol=0.02 if half else 1e-4, atol=0.05 if half else 2e-5
        )


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "softcap"), [(1, None), (8, 0.5), (37, 3.0), (1024, None)])
def test_chunked_logprobs_equal_autograd_over_full_logits(chunk, softcap, dtype, entropy_gradient):
    """The logits are never rounded to half precision, which would cost up to 0.03 here."""
    *leaves, targets, temperature = make(dtype=dtype)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    check(leaves, doubles, (targets, temperature), softcap, chunk, 1e-5, entropy_gradient)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "softcap"), [(8, None), (64, 3.0)])
def test_cuda_logprobs_equal_double_precision(dtype, chunk, softcap):
    *leaves, targets, temperature = make(dtype=dtype)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    check(leaves, doubles, (targets, temperature), softcap, chunk, tolerance=1e-3)


@pytest.mark.parametrize(("vocabulary", "tokens"), [(151_936, 1664), (32_000, 8320), (5_000_000, 128)])
def test_default_chunk_on_cuda_is_a_multiple_of_the_tile(vocabulary, tokens):
    assert lm_head.default_chunk(vocabulary, cuda=True) == tokens
    assert tokens % 128 == 0 and (tokens == 128 or tokens * vocabulary * 4 <= 2**30)


def test_logprobs_of_no_tokens_have_a_gradient():
    hidden, weight, targets, temperature = make(n=0)
    logprobs, *_ = token_logprobs(hidden, weight, targets, temperature)
    logprobs.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.abs().max() == 0


def test_frozen_head_gets_no_gradient():
    hidden, weight, targets, temperature = make()
    logprobs, *_ = token_logprobs(hidden, weight.detach(), targets, temperature)
    logprobs.sum().backward()
    assert hidden.grad is not None


def adapted_head(width, vocabulary, dtype=torch.float32):
    """A frozen output head with a bias and a trained adapter."""
    torch.manual_seed(1)
    head = torch.nn.Linear(width, vocabulary, dtype=dtype).requires_grad_(False)
    head.config = LoRAConfig(rank=4, alpha=8)
    head.lora_A = LowRank(4, width, zero=False, device="cpu")
    head.lora_B = LowRank(vocabulary, 4, zero=False, device="cpu")
    return head


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_adapter_equal_more_columns_of_the_weight(dtype, softcap):
    hidden, _, targets, temperature = make(dtype=dtype)
    head = adapted_head(16, 101, dtype)
    factors = [head.lora_A.weight, head.lora_B.weight]
    logprobs, entropy, _ = _head_logprobs(head, hidden, targets, temperature, 8, None, softcap)
    low = hidden @ factors[0].T.to(dtype) * 2
    wide = torch.cat([hidden, hidden.new_ones(len(hidden), 1), low], 1)
    weight = torch.cat([head.weight, head.bias[:, None], factors[1].to(dtype)], 1)
    expected, wanted, _ = token_logprobs(wide, weight, targets, temperature, 8, softcap=softcap)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy, wanted, rtol=1e-6, atol=2e-6)
    gradient, leaves = torch.linspace(-2, 2, len(hidden)), [hidden, *factors]
    got, same = (torch.autograd.grad(x, leaves, gradient) for x in (logprobs, expected))
    for a, b in zip(got, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=2e-5)


class Largest(TorchDispatchMode):
    """The number of bytes of the largest tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        views = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in views:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


def test_adapter_makes_no_copy_of_the_head():
    hidden, _, targets, temperature = make(n=16, width=256, vocabulary=4000)
    head = adapted_head(256, 4000)
    with Largest() as seen:
        _head_logprobs(head, hidden, targets, temperature, 8, None, None)[0].sum().backward()
    assert 0 < seen.num_bytes < head.weight.untyped_storage().nbytes() / 10
    assert head.lora_B.weight.grad.abs().max() > 0
