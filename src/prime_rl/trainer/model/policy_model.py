"""A causal language model of transformers, wrapped so that it returns log-probabilities instead of logits.

FSDP shards the wrapper as its root: the output embedding is used in the root's forward, where it is gathered.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import meta_device_safe_creation_ops

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.storage.model_files import find_model, find_tokenizer, refuse_quantized
from prime_rl.trainer.micro_batch import MicroBatch, TargetRow
from prime_rl.trainer.model import varlen_attention
from prime_rl.trainer.model.lm_head import SamplingMask, check_output_head, token_logprobs
from prime_rl.trainer.model.routing import RouterLoadBalance, RouterReplay, num_experts
from prime_rl.trainer.model.varlen_attention import (
    fix_frequencies,
    max_dynamic_length,
    recurrent_layers,
    segment_batches,
    segmented_class,
)
from prime_rl.trainer.parallel.device_mesh import ContextParallel, RowSlice

# Layers that support packed rows, and those that do if they are one of `recurrent_layers`, in transformers' names.
_LAYER_TYPES = {"full_attention", "sliding_attention", "mlp", "moe"}
_RECURRENT_TYPES = {"linear_attention", "conv", "hybrid"}


class PolicyModel(nn.Module):
    """A causal language model that returns temperature-scaled log-probabilities of a row's tokens."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        logprob_chunk: int | None = None,
        revision: str | None = None,
        replays_routes: bool = False,
    ) -> None:
        """Change `causal_lm` in place. `replays_routes` raises ConfigError as `RouterReplay`."""
        super().__init__()
        self.revision = revision  # of the base model on the hub
        self.causal_lm = causal_lm
        self._logprob_chunk = logprob_chunk
        text = causal_lm.config.get_text_config()
        self._logit_divisor, self._softcap = logit_divisor(text), logit_softcap(text)
        self.entropy_gradient = False
        self.context_parallel = ContextParallel()  # the ranks that share each row; set by `shard_policy`
        self.routing = RouterLoadBalance(causal_lm)
        self.replay = RouterReplay(causal_lm) if replays_routes else None
        self._measured = ([self.routing] if self.routing.is_moe else []) + ([self.replay] if self.replay else [])
        _route_in_float32(causal_lm)
        self._is_recurrent = _segment_recurrent_layers(causal_lm)
        # A method of the output head, so that FSDP can gather the head's weight for it.
        head = causal_lm.get_output_embeddings()
        head.token_logprobs = partial(_head_logprobs, head)
        # The units of sharding and checkpointing; computed once, because sharding changes their class.
        self.blocks = blocks_of(causal_lm)

    def forward(self, row: MicroBatch | TargetRow) -> tuple[Tensor, ...]:
        """Score the row's trained tokens: logprobs and entropy, float32 [T]; of a `TargetRow` only logprobs [M].

        Entry t belongs to token t given the earlier tokens of its segment, and is 0 outside the loss mask. Entropy, in
        nats, has a gradient if `entropy_gradient` is set. For a row with sampling parameters also bool [T]: the tokens
        that the sampling mask of this policy would have excluded.
        """
        if isinstance(row, TargetRow):
            return (self._score_targets(row),)
        part = self.context_parallel.slice(row)
        self.routing.counted = part.num_tokens if len(row.scored) else 0
        if self.replay is not None:
            segments = row.segment_ids[part.begin : part.begin + part.num_tokens + 1]
            self.replay.begin_row(part.routed_experts, segments.diff() == 0)
        hidden = self._hidden(part)
        scored = part.scored
        temperature = row.temperature[scored] * self._logit_divisor
        mask = SamplingMask.of(row)
        logprobs, entropy, masked = self.causal_lm.get_output_embeddings().token_logprobs(
            hidden.index_select(0, scored - 1 - part.begin),
            row.tokens[scored],
            temperature,
            self._logprob_chunk,
            None if mask is None else mask[scored],
            self._softcap,
            entropy_gradient=self.entropy_gradient,
        )
        values = [logprobs, entropy] if mask is None else [logprobs, entropy, masked.float()]
        zeros = torch.zeros_like(row.temperature)
        rows = [zeros.index_put((scored,), one) for one in values]
        if self.context_parallel.size > 1:  # stacked, so that there is one all-reduce
            rows = [one.clone() for one in self.context_parallel.sum_slices(torch.stack(rows))]
        logprobs, entropy = rows[0], rows[1] if self.entropy_gradient else rows[1].detach()
        return (logprobs, entropy) if mask is None else (logprobs, entropy, rows[2].detach() > 0)

    def reduce_routing(self, sum_ranks: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float | None]:
        """Return the metrics of the routers since the last call, none of a dense model; a collective call."""
        return {name: value for part in self._measured for name, value in part.reduce(sum_ranks, device).items()}

    def _score_targets(self, row: TargetRow) -> Tensor:
        """Return the log-probabilities of the row's targets at temperature 1, float32 [M]."""
        whole = RowSlice(row.tokens, row.position_ids, row.boundaries, row.longest, 0, len(row.tokens), row.positions)
        self.routing.counted = whole.num_tokens
        if self.replay is not None:
            self.replay.begin_row(None)
        head, temperature = self.causal_lm.get_output_embeddings(), torch.ones_like(row.targets, dtype=torch.float32)
        logprobs, _, _ = head.token_logprobs(
            self._hidden(whole).index_select(0, row.positions),
            row.targets,
            temperature * self._logit_divisor,
            self._logprob_chunk,
            None,
            self._softcap,
        )
        return logprobs

    def _hidden(self, row: RowSlice) -> Tensor:
        """Return the states after the last norm, [t, hidden]."""
        shared: dict[str, Any] = {}
        if self.context_parallel.size > 1:
            shared["context_parallel"] = self.context_parallel
        if self._is_recurrent:
            shared["seq_idx"] = segment_batches(row.boundaries)
        output = self.causal_lm.base_model(
            input_ids=row.tokens[None],
            position_ids=row.position_ids[None],
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=row.boundaries,  # the names that flash attention uses
            cu_seq_lens_k=row.boundaries,
            max_length_q=row.longest,
            max_length_k=row.longest,
            **shared,
        )
        return output.last_hidden_state[0]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.causal_lm.config.get_text_config().vocab_size)

    @property
    def max_sample_length(self) -> int | None:
        """Largest number of tokens in a sample; None if unlimited."""
        text = self.causal_lm.config.get_text_config()
        if getattr(text, "rope_parameters", None):
            return max_dynamic_length(text)
        return getattr(text, "max_position_embeddings", None)

    def check_row(self, row: MicroBatch) -> None:
        """Check that tokens and positions of a row on the host have embeddings; on a GPU the process would abort.

        Raises ConfigError if a token or a sample's length is too large, or as `RouterReplay.check`.
        """
        if self.replay is not None:
            self.replay.check(row.routed_experts)
        self.check_range(int(row.tokens.min()), int(row.tokens.max()), row.longest)

    def check_range(self, lowest: int, highest: int, longest: int) -> None:
        """Check the range of tokens and the length of a sample as `check_row`."""
        name, limit = self.causal_lm.config.name_or_path, self.max_sample_length
        for token in (lowest, highest):
            if not 0 <= token < self.vocabulary:
                raise ConfigError(
                    f"the batch contains token {token}, but {name} has {self.vocabulary} tokens; check that "
                    "tokenizer, data and model belong together"
                )
        if limit is not None and longest > limit:
            raise ConfigError(
                f"the batch contains a sample of {longest} tokens, but {name} has {limit} positions; reduce seq_len"
            )


_LOGIT_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier")  # Granite, Cohere, Falcon-H1


def logit_divisor(text: Any) -> float:
    """Return the divisor of the logits in the transformers configuration `text`: Granite divides, others multiply."""
    divide, *multiply = (getattr(text, key, None) or 1.0 for key in _LOGIT_FACTORS)
    return divide / math.prod(multiply)


def logit_softcap(text: Any) -> float | None:
    """Return the limit of the logits, before their divisor, in the transformers configuration `text`; None if none."""
    softcap: float | None = getattr(text, "final_logit_softcapping", None)
    return softcap * logit_divisor(text) if softcap else None


def blocks_of(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks in order; the model names their classes."""
    names = set(causal_lm._no_split_modules or ())
    return [module for module in causal_lm.modules() if type(module).__name__ in names]


def _head_logprobs(
    head: nn.Module, hidden: Tensor, *options: Any, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `token_logprobs` with all its options; a bias and an adapter are further columns of states and weight."""
    hidden = hidden.to(head.weight.dtype)  # Mamba-2 keeps its states in float32
    columns: list[tuple[Tensor, Tensor]] = []
    if (bias := getattr(head, "bias", None)) is not None:
        columns.append((hidden.new_ones(len(hidden), 1), bias[:, None]))
    if (a := head._modules.get("lora_A")) is not None and a.weight is not None:
        low = F.linear(hidden, a.weight.to(hidden.dtype)) * head.config.scale
        columns.append((low, head.lora_B.weight.to(head.weight.dtype)))
    states, weights = ([pair[side] for pair in columns] for side in (0, 1))
    if columns:
        options += ((torch.cat(states, 1), torch.cat(weights, 1)),)
    return token_logprobs(hidden, head.weight, *options, entropy_gradient=entropy_gradient)


def _route_in_float32(model: nn.Module) -> None:
    """Compute the logits of all routers in float32, in place; the inference server does the same (I6).

    Rounded to bfloat16, some tokens would get other experts than those that sampled them. The weights keep the
    precision of the forward pass, in which they are published.
    """
    for block in model.modules():
        router = block._modules.get("gate", block._modules.get("router"))
        if router is not None and num_experts(block):
            for module in router.modules():
                kind: Any = type(module)
                module.__class__ = _float32_class(kind, tuple(module._parameters), module is router)


def _segment_recurrent_layers(model: nn.Module) -> bool:
    """Reset recurrent layers at each segment, in place; return whether there are any.

    Their vectors (decay rates, biases of time steps) are used in float32, as in the kernels of the inference server.
    """
    layers = recurrent_layers(model)
    limit = getattr(model.config.get_text_config(), "time_step_limit", None)
    for layer in layers:
        if limit is not None and hasattr(layer, "time_step_limit"):
            layer.time_step_limit = tuple(limit)  # transformers' Nemotron-H clamps to `time_step_min`, its server not
        vectors = tuple(name for name, p in layer._parameters.items() if p is not None and p.ndim == 1)
        kind: Any = type(layer)
        layer.__class__ = segmented_class(_float32_class(kind, vectors, False))
    return bool(layers)


@cache
def _float32_class(kind: Any, parameters: tuple[str, ...], is_router: bool) -> Any:
    """Return a subclass whose parameters read as float32. One class per kind: compiled blocks are guarded by it."""

    def read(name: str) -> property:
        return property(lambda module: None if (p := module._parameters[name]) is None else p.float())

    members: dict[str, Any] = {name: read(name) for name in parameters}
    if is_router:
        members["forward"] = lambda router, states, *more: kind.forward(router, states.float(), *more)
    return type(kind.__name__, (kind,), members)


def build_policy(config: TrainerModelConfig) -> PolicyModel:
    """Build the model on the meta device, in float32, the precision of the master weights.

    Raises ConfigError if the model is missing, or does not support packed rows or the chunked output head.
    """
    with_weights = not config.debug.random_init
    directory = find_model(config.name, config.revision, config.download_timeout_seconds, with_weights=with_weights)
    hf_config = _hf_config(config, directory)
    options = {"dtype": torch.float32, "attn_implementation": varlen_attention.implementation(config.attn)}
    name, trust = config.name, config.trust_remote_code
    with _explain_refusal("model.name", name, config.attn), torch.device("meta"), meta_device_safe_creation_ops():
        causal_lm = AutoModelForCausalLM.from_config(hf_config, **options, trust_remote_code=trust)
    if type(causal_lm.config) is not type(hf_config):  # transformers built only the part for text
        raise ConfigError(
            f"model.name: {name} is a {hf_config.model_type} model with other parts than text, which published weights "
            "would lose; train its text part, saved by AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    _check_supported(config, causal_lm)
    fix_frequencies(config.name, causal_lm, config.max_model_len, config.seq_len)
    with suppress(OSError):  # the file is optional
        causal_lm.generation_config = GenerationConfig.from_pretrained(directory)
    # Evaluation mode disables dropout, so that trainer and sampler agree (I6).
    return PolicyModel(causal_lm.eval(), config.logprob_chunk_size, config.revision, config.router_replay)


def load_tokenizer(config: TokenizerConfig, model: TrainerModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, by default the model's. Raises ConfigError if it cannot be loaded."""
    name, trust = config.name or model.name, config.trust_remote_code or model.trust_remote_code
    directory = find_tokenizer(config.name, model.name, model.revision, model.download_timeout_seconds)
    with _explain_refusal("tokenizer.name", name):
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust)


def _hf_config(config: TrainerModelConfig, directory: Path) -> Any:
    with _explain_refusal("model.name", config.name):
        hf_config = AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    hf_config.name_or_path = config.name
    refuse_quantized(config.name, hf_config.to_dict())
    layers = config.debug.num_layers
    if layers is not None:
        hf_config.num_hidden_layers = min(layers, hf_config.num_hidden_layers)
        for key in ("layer_types", "layers_block_type"):  # other models compute them
            if types := vars(hf_config).get(key):
                setattr(hf_config, key, types[:layers])
        if hf_config.is_heterogeneous:
            own = hf_config.to_dict()["per_layer_config"]
            hf_config.per_layer_config = {key: own[key] for key in own if int(key) < layers}
    return hf_config


@contextmanager
def _explain_refusal(key: str, name: str, attn: str = "") -> Iterator[None]:
    """Convert an error of transformers for missing or invalid files, or for an attention that does not exist."""
    try:
        yield
    except (
        OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError
    ) as error:  # fmt: skip
        said = summarize_exception(error)
        if isinstance(error, KeyError) and error.args[0] == varlen_attention.ATTENTION_NAME:
            raise _own_attention(name) from None
        if isinstance(error, ImportError) and attn == "flash_attention_2":
            raise ConfigError(f"model.attn {attn!r}: {said.rstrip('.')}; set model.attn to 'auto'") from error
        raise ConfigError(
            f"{key}: cannot load {name!r} as a local directory or from the Hugging Face hub: {said}"
        ) from error


def _check_supported(config: TrainerModelConfig, causal_lm: PreTrainedModel) -> None:
    name, text = config.name, causal_lm.config.get_text_config()
    if any(getattr(module, "is_causal", True) is False for module in causal_lm.modules()):
        raise ConfigError(f"model.name: {name} is not a decoder: its tokens attend to later tokens")
    types, recurrent = getattr(text, "layer_types", None) or [], recurrent_layers(causal_lm)
    known = _LAYER_TYPES | (_RECURRENT_TYPES if len(recurrent) >= sum(t in _RECURRENT_TYPES for t in types) else set())
    if others := set(types) - known:
        raise ConfigError(f"model.name: {name} has {sorted(others)} layers, which do not support packed rows")
    cp = config.cp.degree if config.cp else 1
    fullgraph = config.compile is not None and config.compile.fullgraph
    for key, is_set, off in (
        ("cp.degree", cp > 1, 1),
        ("tp", config.tp > 1, 1),
        ("compile.fullgraph", fullgraph, False),
    ):
        if recurrent and is_set:
            raise ConfigError(f"model.{key}: not supported by the recurrent layers of {name}; set model.{key}={off}")
    if not causal_lm._supports_attention_backend and not recurrent:  # many hybrid models do not set it
        raise _own_attention(name)
    check_output_head(name, causal_lm, logit_divisor(text), logit_softcap(text))
    if config.attn == "sdpa" and getattr(text, "attn_logit_softcapping", None):
        raise ConfigError(f"model.attn: 'sdpa' ignores the softcapped scores of {name}; set model.attn to 'auto'")
    if not blocks_of(causal_lm):
        raise ConfigError(
            f"model.name: {name} does not name the classes of its blocks (_no_split_modules), which sharding and "
            "recomputation require; use a model that docs/training.md lists"
        )
    parameters = [id(parameter) for block in blocks_of(causal_lm) for parameter in block.parameters()]
    if len(set(parameters)) < len(parameters):
        raise ConfigError(
            f"model.name: {name} has blocks that share weights, which sharding does not support; use a model that "
            "docs/training.md lists"
        )
    # Position ids separate the segments in transformers' masks.
    source = inspect.getsource(type(causal_lm.base_model).forward)
    masks_segments = re.search(r"mask\w*\([^)]*position_ids|mask_kwargs = \{[^}]*position_ids", source)
    if config.attn in ("sdpa", "eager") and not masks_segments:
        raise ConfigError(
            f"model.attn: {name} creates its mask without position ids, so {config.attn!r} does not support packed "
            "rows; set model.attn to 'auto'"
        )


def _own_attention(name: str) -> ConfigError:
    return ConfigError(
        f"model.name: {name} does not use transformers' attention interface, so packed rows are not supported"
    )
