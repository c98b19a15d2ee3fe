"""Any causal language model of transformers, wrapped so that it answers with log-probabilities and never with logits.

The wrapper, not the transformers model, is what FSDP shards as its root: the output embedding is used inside the
root's forward, where it is gathered, and the backbone is never called past the root's hooks.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import meta_device_safe_creation_ops

from prime_rl.configs.shared import TokenizerConfig
from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer import attention
from prime_rl.trainer.lm_head import token_logprobs
from prime_rl.trainer.micro_batch import MicroBatch
from prime_rl.trainer.weights import Weights

_ATTENTION = {"auto": attention.NAME, "varlen": attention.NAME}
# What a packed row is exact for; recurrent layers would carry state from one segment into the next.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class PolicyModel(nn.Module):
    """A causal language model and the temperature-scaled log-probabilities it gives to the tokens of a row.

    Attributes:
        causal_lm: the transformers model.
        blocks: its transformer blocks in order: what is sharded and checkpointed one by one.
    """

    def __init__(self, causal_lm: PreTrainedModel, logprob_chunk: int = 1024) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._logprob_chunk = logprob_chunk
        # Found once: sharding gives the blocks another class.
        names = set(causal_lm._no_split_modules or ())
        self.blocks = [module for module in causal_lm.modules() if type(module).__name__ in names]

    def forward(self, row: MicroBatch) -> tuple[Tensor, Tensor]:
        """Score the row's trained tokens.

        Returns:
            logprobs and entropy, float32 [T]; entry t belongs to token t given those before it in its segment, and
            is 0 outside the loss mask. Entropy, in nats, carries no gradient.
        """
        hidden = self._hidden(row)
        head = self.causal_lm.get_output_embeddings().weight
        scored = row.scored
        logprobs, entropy = token_logprobs(
            hidden[scored - 1], head, row.tokens[scored], row.temperature[scored], self._logprob_chunk
        )
        zeros = torch.zeros_like(row.temperature)
        return zeros.index_put((scored,), logprobs), zeros.index_put((scored,), entropy)

    def _hidden(self, row: MicroBatch) -> Tensor:
        """States after the last norm, [T, hidden]. Both spellings of the segments: ours and flash attention's."""
        output = self.causal_lm.base_model(
            input_ids=row.tokens[None],
            position_ids=row.position_ids[None],
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=row.boundaries,
            cu_seq_lens_k=row.boundaries,
            max_length_q=row.longest,
            max_length_k=row.longest,
        )
        return cast(Tensor, output.last_hidden_state)[0]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.causal_lm.config.get_text_config().vocab_size)


def build_policy(config: TrainerModelConfig) -> PolicyModel:
    """Build the model on the meta device: its tensors have float32, the precision of the master weights, but no storage.

    Raises:
        ConfigError: the model is missing, or is of a kind that packed rows or the chunked head would get wrong.
    """
    attention.register()
    if config.impl not in ("auto", "hf"):
        raise ConfigError(f"model.impl={config.impl!r} is not there yet; use 'auto' or 'hf'")
    hf_config = _hf_config(config)
    options = {"dtype": torch.float32, "attn_implementation": _ATTENTION.get(config.attn, config.attn)}
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            causal_lm = AutoModelForCausalLM.from_config(
                hf_config, **options, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load("model.name", config.name, error) from error
    _check_supported(config.name, causal_lm)
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
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _cannot_load("tokenizer.name", name, error) from error


def _hf_config(config: TrainerModelConfig) -> Any:
    _check_exists("model.name", config.name)
    try:
        hf_config = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load("model.name", config.name, error) from error
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
    reason = str(error).strip().split("\n")[0]
    return ConfigError(f"{key}: cannot load {name!r} as a local directory or from the Hugging Face hub: {reason}")


def _check_supported(name: str, causal_lm: PreTrainedModel) -> None:
    config = causal_lm.config.get_text_config()
    head = causal_lm.get_output_embeddings()
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    scaled = {
        key: value
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if (value := getattr(config, key, None)) not in (None, 1, 1.0)
    }
    if others:
        raise ConfigError(f"model.name: {name} has {sorted(others)} layers, which packed rows cannot keep apart")
    if head is None or getattr(head, "bias", None) is not None or scaled:
        raise ConfigError(f"model.name: {name} has an output head that is more than one matrix ({scaled or 'bias'})")
