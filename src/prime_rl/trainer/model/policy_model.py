"""A causal language model of transformers, wrapped so that it returns log-probabilities instead of logits.

FSDP shards the wrapper as its root: the output embedding is used in the root's forward, where it is gathered.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
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

from prime_rl.configs.shared.blocks import TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.trainer.attention import varlen_attention
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.model.lm_head import token_logprobs
from prime_rl.trainer.model.moe_load_balance import RouterLoadBalance
from prime_rl.trainer.model.output_head_check import check_output_head
from prime_rl.trainer.model.rope import fix_frequencies, max_dynamic_length
from prime_rl.trainer.model.sampling_mask import SamplingMask
from prime_rl.trainer.parallel.context_parallel import ContextParallel, RowSlice

# Layers that support packed rows; recurrent layers would carry state from one segment into the next.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class PolicyModel(nn.Module):
    """A causal language model that returns temperature-scaled log-probabilities of a row's tokens."""

    def __init__(self, causal_lm: PreTrainedModel, logprob_chunk: int | None = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._logprob_chunk = logprob_chunk
        text = causal_lm.config.get_text_config()
        self._logit_divisor, self._softcap = logit_divisor(text), logit_softcap(text)
        self.context_parallel = ContextParallel()  # the ranks that share each row; set by `shard_policy`
        self.routing = RouterLoadBalance(causal_lm)
        # A method of the output head, so that FSDP can gather the head's weight for it.
        head = causal_lm.get_output_embeddings()
        head.token_logprobs = partial(_head_logprobs, head)
        # The units of sharding and checkpointing; computed once, because sharding changes their class.
        self.blocks = blocks_of(causal_lm)

    def forward(self, row: MicroBatch) -> tuple[Tensor, ...]:
        """Score the row's trained tokens: logprobs and entropy, float32 [T].

        Entry t belongs to token t given the earlier tokens of its segment, and is 0 outside the loss mask. Entropy, in
        nats, has no gradient. For a row with sampling parameters also bool [T]: the tokens that the sampling mask of
        this policy would have excluded.
        """
        part = self.context_parallel.slice(row)
        self.routing.counted = part.num_tokens if len(row.scored) else 0
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
        )
        values = [logprobs, entropy] if mask is None else [logprobs, entropy, masked.float()]
        zeros = torch.zeros_like(row.temperature)
        rows = [zeros.index_put((scored,), one) for one in values]
        if self.context_parallel.size > 1:  # stacked, so that there is one all-reduce
            rows = [one.clone() for one in self.context_parallel.sum_slices(torch.stack(rows))]
        logprobs, entropy = rows[0], rows[1].detach()
        return (logprobs, entropy) if mask is None else (logprobs, entropy, rows[2].detach() > 0)

    def _hidden(self, row: RowSlice) -> Tensor:
        """Return the states after the last norm, [t, hidden]."""
        shared = {"context_parallel": self.context_parallel} if self.context_parallel.size > 1 else {}
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

        Raises ConfigError if a token or a sample's length is too large.
        """
        name, limit = self.causal_lm.config.name_or_path, self.max_sample_length
        for token in (int(row.tokens.min()), int(row.tokens.max())):
            if not 0 <= token < self.vocabulary:
                raise ConfigError(
                    f"the batch contains token {token}, but {name} has {self.vocabulary} tokens; check that "
                    "tokenizer, data and model belong together"
                )
        if limit is not None and row.longest > limit:
            raise ConfigError(
                f"the batch contains a sample of {row.longest} tokens, but {name} has {limit} positions; reduce seq_len"
            )


def logit_divisor(text: Any) -> float:
    """Return the divisor of the logits in the transformers configuration `text`: Granite divides, Cohere multiplies."""
    divide, multiply = getattr(text, "logits_scaling", None), getattr(text, "logit_scale", None)
    return (divide or 1.0) / (multiply or 1.0)


def logit_softcap(text: Any) -> float | None:
    """Return the limit of the logits, before their divisor, in the transformers configuration `text`; None if none."""
    softcap: float | None = getattr(text, "final_logit_softcapping", None)
    return softcap * logit_divisor(text) if softcap else None


def blocks_of(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks in order; the model names their classes."""
    names = set(causal_lm._no_split_modules or ())
    return [module for module in causal_lm.modules() if type(module).__name__ in names]


def _head_logprobs(head: nn.Module, hidden: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Call `token_logprobs`; a bias becomes one more column of the weight, and every state gets a one."""
    weight, bias = head.weight, getattr(head, "bias", None)
    if bias is not None:
        hidden, weight = F.pad(hidden, (0, 1), value=1.0), torch.cat([weight, bias[:, None]], 1)
    return token_logprobs(hidden, weight, *options)


def build_policy(config: TrainerModelConfig) -> PolicyModel:
    """Build the model on the meta device, in float32, the precision of the master weights.

    Raises ConfigError if the model is missing, or does not support packed rows or the chunked output head.
    """
    hf_config = _hf_config(config)
    options = {"dtype": torch.float32, "attn_implementation": varlen_attention.implementation(config.attn)}
    name, trust = config.name, config.trust_remote_code
    with _explain_refusal("model.name", name, config.attn), torch.device("meta"), meta_device_safe_creation_ops():
        causal_lm = AutoModelForCausalLM.from_config(hf_config, **options, trust_remote_code=trust)
    _check_supported(config, causal_lm)
    fix_frequencies(config.name, causal_lm, config.max_model_len, config.seq_len)
    with suppress(OSError):  # the file is optional
        causal_lm.generation_config = GenerationConfig.from_pretrained(config.name)
    # Evaluation mode disables dropout, so that trainer and sampler agree (I6).
    return PolicyModel(causal_lm.eval(), config.logprob_chunk_size)


def load_tokenizer(config: TokenizerConfig, model: TrainerModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, by default the model's. Raises ConfigError if it cannot be loaded."""
    name, trust = config.name or model.name, config.trust_remote_code or model.trust_remote_code
    _check_exists("tokenizer.name", name)
    with _explain_refusal("tokenizer.name", name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust)


def _hf_config(config: TrainerModelConfig) -> Any:
    _check_exists("model.name", config.name)
    with _explain_refusal("model.name", config.name):
        hf_config = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError(f"model.name: {config.name} is quantized; train the original model")
    layers = config.debug.num_layers
    if layers is not None:
        hf_config.num_hidden_layers = min(layers, hf_config.num_hidden_layers)
        if getattr(hf_config, "layer_types", None):
            hf_config.layer_types = hf_config.layer_types[:layers]
    return hf_config


def _check_exists(key: str, name: str) -> None:
    """Raise for a path that does not exist, so that it is not used as a hub id."""
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ConfigError(f"{key}: {name} does not exist; give a directory or a hub id such as Qwen/Qwen3-0.6B")


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
    if others := set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES:
        raise ConfigError(f"model.name: {name} has {sorted(others)} layers, which do not support packed rows")
    if not causal_lm._supports_attention_backend:
        raise _own_attention(name)
    check_output_head(name, causal_lm, logit_divisor(text), logit_softcap(text))
    if config.attn == "sdpa" and getattr(text, "attn_logit_softcapping", None):
        raise ConfigError(f"model.attn: 'sdpa' ignores the softcapped scores of {name}; set model.attn to 'auto'")
    if not blocks_of(causal_lm):
        raise ConfigError(
            f"model.name: {name} does not name the classes of its blocks (_no_split_modules), which sharding and "
            "recomputation require; use a model that docs/training.md lists"
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
