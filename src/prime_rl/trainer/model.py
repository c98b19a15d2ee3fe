"""Any causal language model of transformers, wrapped so that it answers with log-probabilities and never with logits.

The wrapper, not the transformers model, is what FSDP shards as its root: the output embedding is used inside the
root's forward, where it is gathered, and the backbone is never called past the root's hooks.
"""

import inspect
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

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

from prime_rl.configs.shared import TokenizerConfig
from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError, first_line
from prime_rl.trainer import attention
from prime_rl.trainer.context_parallel import ContextParallel, RowSlice
from prime_rl.trainer.kernels import fuse_kernels
from prime_rl.trainer.lm_head import token_logprobs
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.moe import Routing
from prime_rl.trainer.truncation import Truncation
from prime_rl.trainer.weights import Weights

# What a packed row is exact for; recurrent layers would carry state from one segment into the next.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# What transformers raises of files that are missing, or that hold something else than what they should.
_REFUSALS = (
    OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError
)  # fmt: skip


class PolicyModel(nn.Module):
    """A causal language model and the temperature-scaled log-probabilities it gives to the tokens of a row.

    Attributes:
        causal_lm: the transformers model.
        blocks: its transformer blocks in order: what is sharded and checkpointed one by one.
        routing: counts what the routers of a mixture of experts choose.
        context_parallel: the ranks that share each row; set where the model is sharded.
    """

    def __init__(self, causal_lm: PreTrainedModel, logprob_chunk: int | None = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._logprob_chunk = logprob_chunk
        text = causal_lm.config.get_text_config()
        # Two families scale their logits, which is one more temperature: Granite divides, Cohere multiplies.
        divide, multiply = getattr(text, "logits_scaling", None), getattr(text, "logit_scale", None)
        self._logit_divisor = (divide or 1.0) / (multiply or 1.0)
        self.context_parallel = ContextParallel()
        self.routing = Routing(causal_lm)
        # Found once: sharding gives the blocks another class.
        names = set(causal_lm._no_split_modules or ())
        self.blocks = [module for module in causal_lm.modules() if type(module).__name__ in names]

    def forward(self, row: MicroBatch) -> tuple[Tensor, ...]:
        """Score the row's trained tokens.

        Returns:
            logprobs and entropy, float32 [T]; entry t belongs to token t given those before it in its segment, and
            is 0 outside the loss mask. Entropy, in nats, carries no gradient. Of a row that says how the sampler cut
            its distribution also bool [T]: the tokens that this policy's own cut would have left out.
        """
        mine = self.context_parallel.slice(row)
        self.routing.counted = mine.filled if len(row.scored) else 0
        hidden = self._hidden(mine)
        hidden, head = self._as_product(hidden)
        scored = mine.scored
        temperature = row.temperature[scored] * self._logit_divisor
        truncation = Truncation.of(row)
        logprobs, entropy, left_out = token_logprobs(
            hidden.index_select(0, scored - 1 - mine.begin),
            head,
            row.tokens[scored],
            temperature,
            self._logprob_chunk,
            None if truncation is None else truncation[scored],
        )
        zeros, whole = torch.zeros_like(row.temperature), self.context_parallel.whole
        answers = whole(zeros.index_put((scored,), logprobs)), whole(zeros.index_put((scored,), entropy))
        if truncation is None:
            return answers
        return *answers, whole(zeros.index_put((scored,), left_out.float())) > 0

    def _hidden(self, row: RowSlice) -> Tensor:
        """States after the last norm, [t, hidden]. Both spellings of the segments: ours and flash attention's."""
        shared = {"context_parallel": self.context_parallel} if self.context_parallel.size > 1 else {}
        output = self.causal_lm.base_model(
            input_ids=row.tokens[None],
            position_ids=row.position_ids[None],
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=row.boundaries,
            cu_seq_lens_k=row.boundaries,
            max_length_q=row.longest,
            max_length_k=row.longest,
            **shared,
        )
        return cast(Tensor, output.last_hidden_state)[0]

    def _as_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States and matrix whose product is the logits: a bias becomes a column, for which every state has a one."""
        head = self.causal_lm.get_output_embeddings()
        if getattr(head, "bias", None) is None:
            return hidden, head.weight
        return F.pad(hidden, (0, 1), value=1.0), torch.cat([head.weight, head.bias[:, None]], 1)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.causal_lm.config.get_text_config().vocab_size)

    def check_row(self, row: MicroBatch) -> None:
        """Refuse tokens and positions that have no embedding; a GPU would end the process without saying which.

        Args:
            row: still on the host.

        Raises:
            ConfigError: names the first that is too large.
        """
        text, name = self.causal_lm.config.get_text_config(), self.causal_lm.config.name_or_path
        for token in (int(row.tokens.min()), int(row.tokens.max())):
            if not 0 <= token < self.vocabulary:
                raise ConfigError(
                    f"there is token {token} to train on, but {name} knows {self.vocabulary} tokens; tokenizer, data "
                    "and model do not belong together"
                )
        longest = None if getattr(text, "rope_parameters", None) else getattr(text, "max_position_embeddings", None)
        if longest is not None and row.longest > longest:
            raise ConfigError(
                f"there is a sample of {row.longest} tokens, but {name} has {longest} positions; cut samples"
            )


def build_policy(config: TrainerModelConfig) -> PolicyModel:
    """Build the model on the meta device, its tensors in float32, the precision of the master weights.

    Raises:
        ConfigError: the model is missing, or is of a kind that packed rows or the chunked head would get wrong.
    """
    attention.register()
    hf_config = _hf_config(config)
    options = {"dtype": torch.float32, "attn_implementation": attention.implementation(config.attn)}
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            causal_lm = AutoModelForCausalLM.from_config(
                hf_config, **options, trust_remote_code=config.trust_remote_code
            )
    except _REFUSALS as error:
        if isinstance(error, KeyError) and error.args[0] in (attention.NAME, attention.LONG_NAME):
            raise _own_attention(config.name) from None
        if isinstance(error, ImportError) and config.attn == "flash_attention_2":
            raise ConfigError(
                f"model.attn 'flash_attention_2': {first_line(error).rstrip('.')}; set model.attn to 'auto'"
            ) from error
        raise _cannot_load("model.name", config.name, error) from error
    _check_supported(config, causal_lm)
    with suppress(OSError):  # a model need not have the file
        causal_lm.generation_config = GenerationConfig.from_pretrained(config.name)
    # Evaluation mode switches dropout off, which would make the trainer disagree with the sampler (I6).
    return PolicyModel(causal_lm.eval(), config.logprob_chunk_size)


def load_policy(config: TrainerModelConfig, seed: int) -> PolicyModel:
    """Load the whole model on the CPU, not sharded.

    Args:
        config: which model, and what to change for a quick test.
        seed: of the weights where `config.debug.random_init`.

    Raises:
        ConfigError: the model is missing or cannot be trained.
    """
    policy, cpu = build_policy(config), torch.device("cpu")
    fuse_kernels(policy.causal_lm, config, cpu)
    Weights(policy.causal_lm, config, seed).fill(policy, policy.causal_lm, cpu, cpu)
    return policy


def load_tokenizer(config: TokenizerConfig, model: TrainerModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `config` names, by default the model's own.

    Raises:
        ConfigError: it is missing.
    """
    name = config.name or model.name
    _check_exists("tokenizer.name", name)
    trust = config.trust_remote_code or model.trust_remote_code
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(name, trust_remote_code=trust))
    except _REFUSALS as error:
        raise _cannot_load("tokenizer.name", name, error) from error


def _hf_config(config: TrainerModelConfig) -> Any:
    _check_exists("model.name", config.name)
    try:
        hf_config = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    except _REFUSALS as error:
        raise _cannot_load("model.name", config.name, error) from error
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError(f"model.name: {config.name} is quantized; train the model whose weights were quantized")
    layers = config.debug.num_layers
    if layers is not None:
        hf_config.num_hidden_layers = min(layers, hf_config.num_hidden_layers)
        if getattr(hf_config, "layer_types", None):
            hf_config.layer_types = hf_config.layer_types[:layers]
    return hf_config


def _check_exists(key: str, name: str) -> None:
    """Tell a mistyped path from a hub id before the hub is asked for it."""
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ConfigError(f"{key}: {name} does not exist; give a directory or a hub id such as Qwen/Qwen3-0.6B")


def _cannot_load(key: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{key}: cannot load {name!r} as a local directory or from the Hugging Face hub: {first_line(error)}"
    )


def _check_supported(config: TrainerModelConfig, causal_lm: PreTrainedModel) -> None:
    name, text = config.name, causal_lm.config.get_text_config()
    if any(getattr(module, "is_causal", True) is False for module in causal_lm.modules()):
        raise ConfigError(f"model.name: {name} is no decoder: its tokens attend to those that follow them")
    if others := set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES:
        raise ConfigError(f"model.name: {name} has {sorted(others)} layers, which packed rows cannot keep apart")
    if not causal_lm._supports_attention_backend:
        raise _own_attention(name)
    if causal_lm.get_output_embeddings() is None or getattr(text, "final_logit_softcapping", None):
        raise ConfigError(f"model.name: {name} has an output head that is more than one matrix (softcapped logits)")
    if config.attn in ("sdpa", "eager") and not _masks_segments(causal_lm):
        raise ConfigError(
            f"model.attn: {name} makes its mask without position ids, so {config.attn!r} would not keep packed "
            "segments apart; set model.attn to 'auto'"
        )


def _masks_segments(causal_lm: PreTrainedModel) -> bool:
    """Whether the model hands position ids to transformers' masks, which tell segments by them; read in its source."""
    source = inspect.getsource(type(causal_lm.base_model).forward)
    return re.search(r"mask\w*\([^)]*position_ids|mask_kwargs = \{[^}]*position_ids", source) is not None


def _own_attention(name: str) -> ConfigError:
    return ConfigError(
        f"model.name: {name} computes its attention by itself instead of through transformers' interface, so packed "
        "segments cannot be kept apart"
    )
