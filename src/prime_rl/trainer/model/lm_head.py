"""Log-probabilities and entropies of given tokens without the full logits in memory.

At most `chunk x vocabulary` logits exist at a time (four times that where nothing is compiled). The forward pass
iterates over the tokens, because a softmax needs the whole vocabulary. The backward pass recomputes the logits and
iterates over the vocabulary, so each part of the weight's gradient is one product and needs no copy in float32.

Logits, sums and softmaxes are in float32 for any dtype of the weights: bfloat16 would round a logit of 20, and with it
the log-probability, by up to 0.06.

A `SamplingMask` holds the tokens that top-k, top-p and min-p keep, as the sampler computes them (I6). vLLM applies
temperature, then min-p, top-k and top-p, each to the remaining distribution (`Sampler.sample`, `MinPLogitsProcessor`
and `apply_top_k_top_p` of vLLM 0.32). Each keeps the most likely tokens, so together they keep the tokens above one
threshold (`kept_threshold`).

Log-probabilities come from the last states and the output matrix alone, which would silently lose other operations of a
model's forward (another scale, a projection). `check_output_head` runs this forward with a backbone and an output layer
that return known values, before weights are read. It detects what no name in a configuration announces.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.trainer.micro_batch import MicroBatch

_LOGITS = 2**24
"""Default number of logits in memory on a CPU: 64 MiB in float32."""
_LOGITS_CUDA = 2**28
"""Default on CUDA: 1 GiB. The whole weight is read for every chunk, so small chunks are memory bound."""
_TILE = 128
"""Chunks on CUDA are multiples of the tile size of matrix products."""
_STRIPE = 64
"""Blocks of the vocabulary are multiples of this, which matrix products require for speed."""
_COPIED = 4096
"""Rows of the output embedding that a CPU converts to float32 at a time."""
_MASKED = -1e30
"""Logit of a masked token. It is finite, so that probability times log-probability is 0 and not NaN."""
_NUCLEUS = 1024
"""Without top-k, the nucleus is searched among this many tokens before all are sorted."""


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The sampler's parameters for each of N tokens."""

    top_k: Tensor  # int [N], number of the most likely tokens to keep, and ties of the last one; 0 keeps all
    top_p: Tensor  # float32 [N], keep the fewest most likely tokens with at least this mass; 1 keeps all
    min_p: Tensor  # float32 [N], keep tokens at least this likely relative to the most likely one; 0 keeps all

    @classmethod
    def of(cls, row: MicroBatch) -> Self | None:
        """Return the parameters of all tokens of a row; None if it has none."""
        if row.top_k is None and row.top_p is None and row.min_p is None:
            return None
        zeros = torch.zeros_like(row.temperature)
        return cls(
            top_k=zeros.int() if row.top_k is None else row.top_k,
            top_p=zeros + 1 if row.top_p is None else row.top_p,
            min_p=zeros if row.min_p is None else row.min_p,
        )

    def __getitem__(self, index: slice | Tensor) -> "SamplingMask":
        return SamplingMask(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def active(self) -> Tensor:
        """Whether any token is masked, bool [N]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def kept_threshold(logits: Tensor, mask: SamplingMask) -> Tensor:
    """Return the threshold float32 [N] of `logits` [N, V], divided by the temperature: lower logits are masked.

    The threshold lies between the last kept logit and the first masked one, so recomputed logits, which may differ in
    the last bit, give the same mask. It is -inf if all tokens are kept. Ties of the last kept token are kept; vLLM does
    the same for top-k on a CPU, and otherwise keeps an arbitrary part of them.
    """
    result = torch.full((len(logits),), -torch.inf, device=logits.device)
    rows = mask.active.nonzero()[:, 0]
    if len(rows):
        result[rows] = _find_threshold(logits[rows], mask[rows])
    return result


def _find_threshold(logits: Tensor, mask: SamplingMask) -> Tensor:
    vocabulary = logits.shape[1]
    top_k = mask.top_k.long()
    top_k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    widest = int(top_k.max())
    width = min(vocabulary, 1 + (widest if widest < vocabulary else _NUCLEUS))
    while True:
        top = logits.topk(width).values
        last = _lowest_kept_logit(top, logits, top_k, mask)
        kept = (top >= last[:, None]).sum(-1)
        if width == vocabulary or bool((kept < width).all()):
            break
        width = vocabulary  # more tokens are kept than were searched
    following = top.gather(1, kept.clamp(max=width - 1)[:, None])[:, 0]
    middle = ((last.double() + following.double()) / 2).float()
    middle = torch.maximum(middle, torch.nextafter(following, last))  # there is no float between neighbours
    return torch.where(kept == width, -torch.inf, middle)


def _lowest_kept_logit(top: Tensor, logits: Tensor, top_k: Tensor, mask: SamplingMask) -> Tensor:
    """Return the lowest kept logit [N], searched among the highest logits `top`."""
    best, vocabulary = top[:, :1], logits.shape[1]
    by_min_p = best + mask.min_p.log()[:, None]
    by_top_k = top.gather(1, (top_k - 1).clamp(max=top.shape[1] - 1)[:, None])
    by_top_k = torch.where(top_k[:, None] < vocabulary, by_top_k, -torch.inf)
    lowest = torch.maximum(by_min_p, by_top_k)
    mass = torch.where(top >= lowest, (top - best).double().exp(), 0.0)
    total = mass.sum(-1, keepdim=True)
    if bool((top[:, -1:] >= lowest).any()):  # the tail also has mass
        total = torch.where(logits >= lowest, (logits - best).exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    before = mass.cumsum(-1) - mass
    top_p = mask.top_p.double()[:, None]
    inside = (top >= lowest) & ((before < top_p * total) | (top_p >= 1))
    return top.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)[:, 0]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk: int | None = None,
    mask: SamplingMask | None = None,
    softcap: float | None = None,
    more: tuple[Tensor, Tensor] | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score tokens under softmax(hidden @ weight.T / temperature), with the sampler's top-k, top-p and min-p.

    With a softcap, softcap * tanh(logits / softcap) replaces the logits, before temperature and sampling mask.

    With a sampling mask, log-probability and entropy are those of the renormalised remaining distribution: the tokens
    that these logits keep, and the target itself, which the sampler kept. The mask is constant in the gradient.

    Args:
        hidden: [N, H], the states that predict the tokens; N may be 0.
        weight: [V, H], the output embedding.
        targets: int64 [N], the tokens.
        temperature: float32 [N], positive.
        chunk: number of tokens whose logits are in memory at a time; None: `default_chunk`.
        mask: sampling mask of the N tokens, or None.
        softcap: limit of the absolute value of the logits, positive; None for none.
        more: further columns [N, R] of `hidden` and [V, R] of `weight`, for an adapter or a bias: their product is
            added to the logits without a copy of `weight`.
        entropy_gradient: the entropy is differentiable, too.

    Returns:
        logprobs float32 [N], differentiable in `hidden`, `weight` and `more`; entropy float32 [N] in nats; masked bool
        [N], the targets that these logits alone would have masked.
    """
    options = chunk or default_chunk(len(weight), hidden.is_cuda), mask, softcap, entropy_gradient
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, *options, *(more or (None, None)))


def default_chunk(vocabulary: int, cuda: bool) -> int:
    """Return the number of tokens whose logits are in memory at a time."""
    if cuda:
        return max(_TILE, _LOGITS_CUDA // vocabulary // _TILE * _TILE)
    return max(1, _LOGITS // vocabulary)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot - p) / temperature, with p the softmax.

    d entropy / d logits = -p (log p + entropy) / temperature. Both times 1 - (capped / softcap)^2 for capped logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        mask: SamplingMask | None,
        softcap: float | None,
        entropy_gradient: bool,
        more_hidden: Tensor | None,
        more_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(hidden)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy, log_normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        masked = torch.zeros_like(logprobs, dtype=torch.bool)
        threshold = None if mask is None else torch.empty_like(logprobs)
        buffer = logprobs.new_empty(min(chunk, count), len(weight))
        score = _compile(_score) if hidden.is_cuda else _score
        cap = _compile(_cap) if hidden.is_cuda else _cap
        for begin in range(0, count, chunk):
            part = slice(begin, begin + chunk)
            logits = buffer[: len(hidden[part])]
            _multiply(hidden[part], weight, logits)
            if more_hidden is not None and more_weight is not None:
                _add_columns(logits, more_hidden[part], more_weight)
            if softcap is not None:
                cap(logits, softcap)
            divisor: Tensor | None = temperature[part]
            chosen = logits.gather(1, targets[part, None]).div_(temperature[part, None])
            if mask is not None and threshold is not None:
                logits.div_(temperature[part, None])
                divisor = None
                threshold[part] = kept_threshold(logits, mask[part])
                masked[part] = chosen[:, 0] < threshold[part]
                logits.masked_fill_(logits < threshold[part, None], _MASKED).scatter_(1, targets[part, None], chosen)
            logprobs[part], entropy[part] = score(logits, targets[part], divisor)
            log_normalizer[part] = chosen[:, 0] - logprobs[part]
        more = threshold, entropy if entropy_gradient else None, more_hidden, more_weight
        ctx.save_for_backward(hidden, weight, targets, temperature, logprobs, log_normalizer, *more)
        ctx.chunk, ctx.softcap = chunk, softcap
        ctx.mark_non_differentiable(masked, *(() if entropy_gradient else (entropy,)))
        return logprobs, entropy, masked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, logprobs, log_normalizer, threshold, entropy, *more = ctx.saved_tensors
        count, vocabulary = len(hidden), len(weight)
        scale = grad / temperature
        at_target = scale * -torch.expm1(logprobs)
        bonus = None if entropy is None else (grad_entropy / temperature, entropy)
        if bonus is not None:
            at_target -= bonus[0] * logprobs.exp() * (logprobs + entropy)
        if ctx.softcap is not None:
            at_target *= 1 - ((logprobs + log_normalizer) * temperature / ctx.softcap) ** 2
        width = vocabulary if count <= ctx.chunk else max(_STRIPE, ctx.chunk * vocabulary // count // _STRIPE * _STRIPE)
        buffer = grad.new_empty(count * width)
        slope_of = _compile(_slope) if hidden.is_cuda else _slope
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        has_more = more[0] is not None
        grad_more = [torch.zeros_like(more[0], dtype=torch.float32), torch.empty_like(more[1])] if has_more else None
        for begin in range(0, vocabulary, width):
            block = slice(begin, min(begin + width, vocabulary))
            logits = buffer[: count * (block.stop - begin)].view(count, block.stop - begin)
            _multiply(hidden, weight[block], logits)
            if grad_more is not None:
                _add_columns(logits, more[0], more[1][block])
            slope = slope_of(logits, temperature, log_normalizer, threshold, scale, bonus, ctx.softcap, hidden.dtype)
            slope = _set_targets(slope, targets - begin, at_target.to(hidden.dtype))
            _add_product(grad_hidden, slope, weight[block])
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[block])
            if grad_more is not None:
                _add_product(grad_more[0], slope, more[1][block])
                torch.mm(slope.t(), more[0], out=grad_more[1][block])
        ends = (None, None) if grad_more is None else (grad_more[0].to(hidden.dtype), grad_more[1])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None, *ends


def _cap(logits: Tensor, softcap: float) -> None:
    """Replace logits by softcap * tanh(logits / softcap)."""
    logits.div_(softcap).tanh_().mul_(softcap)


def _score(logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return logprobs [n] and entropies [n] of logits [n, V]; `temperature` is None if it is applied already."""
    logprobs = torch.log_softmax(logits if temperature is None else logits / temperature[:, None], -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def _slope(
    logits: Tensor,
    temperature: Tensor,
    log_normalizer: Tensor,
    threshold: Tensor | None,
    scale: Tensor,
    bonus: tuple[Tensor, Tensor] | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return -p (scale + entropy_scale (log p + entropy)) of a block of the vocabulary, p the softmax.

    `bonus` is entropy_scale [N] and entropy [N]; None is 0. The result is times the derivative of the softcap.
    """
    derivative: Tensor | float = 1.0
    if softcap is not None:
        ratio = torch.tanh(logits / softcap)
        logits, derivative = ratio * softcap, 1 - ratio**2
    logits = logits / temperature[:, None]
    if threshold is not None:
        logits = torch.where(logits < threshold[:, None], _MASKED, logits)
    logprobs, factor = logits - log_normalizer[:, None], scale[:, None]
    if bonus is not None:
        factor = factor + bonus[0][:, None] * (logprobs + bonus[1][:, None])
    return (logprobs.exp() * -factor * derivative).to(dtype)


def _set_targets(slope: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    """Write `values` [N] at the columns `targets` [N] of `slope` [N, v]; columns outside are ignored."""
    column = targets.clamp(0, slope.shape[1] - 1)
    values = torch.where(column == targets, values, slope.gather(1, column[:, None])[:, 0])
    return slope.scatter_(1, column[:, None], values[:, None])


def _multiply(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out = hidden @ weight.T in float32 for any dtype of the factors."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:  # on a CPU the product of half-precision factors is rounded
        hidden = hidden.float()
        copy = torch.empty(min(len(weight), _COPIED), weight.shape[1])
        for begin in range(0, len(weight), _COPIED):
            part = weight[begin : begin + _COPIED]
            torch.mm(hidden, copy[: len(part)].copy_(part).t(), out=out[:, begin : begin + _COPIED])


def _add_columns(logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add hidden @ weight.T in float32; there are few columns, so that copies of the factors are small."""
    logits.addmm_(hidden.float(), weight.float().t())


def _add_product(total: Tensor, slope: Tensor, weight: Tensor) -> None:
    """Compute total += slope @ weight in float32."""
    if slope.dtype == total.dtype:
        total.addmm_(slope, weight)
    elif slope.is_cuda:
        total += torch.mm(slope, weight, out_dtype=total.dtype)
    else:
        total += slope @ weight


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function`, for any number of tokens, if there is a C compiler, which triton requires at run time."""
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
    return torch.compile(function, dynamic=True) if compiler else function


_CHECKED_TOKENS = 2
_LARGEST_LOGIT = 100.0  # far above every softcap in use (30 or 50)
_LOGIT_TOL = 1e-3


class _Output:
    """Output of a backbone: the states, and None for every other field."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Backbone(nn.Module):
    """Returns states of ones, as do its submodules; other attributes are those of the original backbone."""

    def __init__(self, original: nn.Module, states: Tensor) -> None:
        super().__init__()
        self._states = states
        self.__dict__["_original"] = original  # set this way, it is not a submodule

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self._states)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_original"], name)
        return self if isinstance(value, nn.Module) else value  # OPT calls the decoder inside its backbone


class _Head(nn.Module):
    """Linear in its input, so that it detects a factor before the head as well."""

    def __init__(self, logits: Tensor, width: int) -> None:
        super().__init__()
        self.logits = logits
        self.weight = nn.Parameter(torch.zeros(1, width), requires_grad=False)
        self.bias = None

    def forward(self, states: Tensor) -> Tensor:
        return states[..., :1] * self.logits


@torch.no_grad()
def check_output_head(name: str, causal_lm: PreTrainedModel, divisor: float, softcap: float | None = None) -> None:
    """Raise ConfigError unless the logits are the output matrix times the backbone's states, divided by `divisor`.

    With `softcap`, that product x is replaced by softcap * tanh(x / softcap) before the division. The model may be on
    the meta device and does not change.
    """
    head, backbone = causal_lm.get_output_embeddings(), causal_lm.base_model
    if head is None or backbone is causal_lm or getattr(head, "weight", None) is None:
        raise ConfigError(f"model.name: {name} has no output head that is one matrix outside its backbone")
    vocabulary, width = head.weight.shape
    with torch.device("cpu"):
        known = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, vocabulary)
        ids = torch.zeros(1, _CHECKED_TOKENS, dtype=torch.int64)
        replaced = {backbone: _Backbone(backbone, torch.ones(1, _CHECKED_TOKENS, width)), head: _Head(known, width)}
    places = {module: name for name, module in causal_lm.named_modules() if module in replaced}
    try:
        for original, module in replaced.items():
            causal_lm.set_submodule(places[original], module)
        got = causal_lm(input_ids=ids, use_cache=False).logits
    except Exception as error:  # the model's own code may raise anything
        raise ConfigError(f"model.name: {name}: cannot check its output head: {summarize_exception(error)}") from error
    finally:
        for original, place in places.items():
            causal_lm.set_submodule(place, original)
    capped = known if softcap is None else softcap * torch.tanh(known / softcap)
    wanted = (capped / divisor).expand(1, _CHECKED_TOKENS, -1)
    if got.shape != wanted.shape or not torch.allclose(got.float(), wanted, rtol=_LOGIT_TOL, atol=_LOGIT_TOL):
        raise ConfigError(
            f"model.name: {name} computes its logits by more than one matrix, a constant factor and "
            "final_logit_softcapping; use a model that docs/training.md lists"
        )
