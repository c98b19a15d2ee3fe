"""Tiny random models in Hugging Face format, and their publication as policy versions."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.storage.artifact import WEIGHTS_FORMAT, publish_artifact
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHARACTERS = ("\n", *map(chr, range(32, 127)))
VOCAB_SIZE = 128

CHAT_TEMPLATE = (Path(__file__).parents[2] / "configs/chat_templates/tools.jinja").read_text()


def make_tiny_model(path: Path, tie_word_embeddings: bool = True, seed: int = 0, std: float = 0.2) -> Path:
    """Write a random Qwen3 model (hidden 64, 2 layers, head_dim 32, vocabulary 128, fp32) with its tokenizer.

    Args:
        path: the directory to write; created if missing.
        tie_word_embeddings: the output head shares the embedding's storage.
        seed: of the random weights; logits have a standard deviation of about 8 * std.
        std: standard deviation of the initial weights.

    Returns:
        `path`.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the minimum of vLLM's attention on a CPU
        max_position_embeddings=2048,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_tokenizer() -> Any:
    """Return the tokenizer: one token per printable ASCII character, per role word and per chat marker (103 in all)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *ROLES, *CHARACTERS, "<unk>"))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(role, normalized=False, special=False) for role in ROLES])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_random_model(config: Any, path: Path, seed: int) -> Path:
    """Save a model of transformers' configuration `config` with random weights, and the tokenizer, in `path`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def publish_weights(
    run_dir: Path, model_dir: Path, step: int, branch: int = 0, *, overrides: Mapping[str, Any] | None = None
) -> Path:
    """Publish the model in `model_dir` as version (branch, step) of the run at `run_dir`.

    Args:
        run_dir: the run's output directory.
        model_dir: the directory to copy, of a Hugging Face model or a published version.
        step: the version's step.
        branch: the version's branch.
        overrides: manifest fields to replace, for invalid manifests.

    Returns:
        The published directory, `weights/step_{step}`.
    """
    target = RunPaths(run_dir).weights(step)

    def write(temporary: Path) -> Mapping[str, Any]:
        shutil.copytree(model_dir, temporary, dirs_exist_ok=True)
        tensors = hash_tensors(temporary)
        manifest = {"format": WEIGHTS_FORMAT, "branch": branch, "step": step, "tensors": tensors}
        return {**manifest, "hash": content_hash(tensors), **(overrides or {})}

    publish_artifact(target, write)
    return target
