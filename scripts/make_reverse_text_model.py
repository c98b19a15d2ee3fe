"""Train the small model of configs/reverse_text/cpu.toml again, on a CPU, in about half a minute:

    uv run --extra cpu python scripts/make_reverse_text_model.py

It writes a random Qwen3 model of 410,368 parameters with one token per character, generates supervised examples
(words and their reversals), trains on them with `sft` as configured in configs/reverse_text/sft_cpu.toml, and copies
the result to configs/reverse_text/model. Everything is seeded and runs on one thread: the same machine and versions
give the same file, bit for bit. Its SHA-256 is printed.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

WEIGHTS_SEED = 0
EXAMPLES = 20_000
MIN_LETTERS, MAX_LETTERS = 3, 5

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHARACTERS = ("\n", *map(chr, range(32, 127)))
UNKNOWN = "<unk>"
VOCABULARY = 128  # the 103 tokens, rounded up to a multiple that suits matrix kernels
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class WarmStart:
    """What a small model is trained on before its recipe.

    Attributes:
        make_examples: yields questions and replies in turn.
        folder: has the recipe `sft_cpu.toml`, and gets the folder `model`.
        system_prompt: of all examples.
    """

    make_examples: Callable[[], Iterator[tuple[str, ...]]]
    folder: Path
    system_prompt: str = ""


def main(description: str | None, start: WarmStart) -> None:
    """Train the model and replace `--output`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=start.folder / "model", help="directory to write (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, help="work in this directory and keep it, instead of a temporary one")
    parser.add_argument("overrides", nargs="*", help="further arguments of sft, after --")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: several threads add in a different order
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.keep or Path(temporary)
        write_random_model(work / "random", make_tokenizer(), VOCABULARY)
        write_examples(work / "examples.jsonl", start.make_examples(), start.system_prompt)
        trained = fine_tune(work, start.folder / "sft_cpu.toml", arguments.overrides)
        replace_model(trained, arguments.output)
    print(f"{arguments.output}: sha256 {digest(arguments.output / 'model.safetensors')} of model.safetensors")


def write_random_model(directory: Path, tokenizer: Any, vocabulary: int, context: int = 2048) -> None:
    """Write an untrained model for `vocabulary` tokens, and its tokenizer, in Hugging Face layout."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(WEIGHTS_SEED)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer() -> Any:
    """Build the tokenizer: one token for each printable ASCII character, role and chat marker."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *ROLES, *CHARACTERS, UNKNOWN))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=UNKNOWN,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(role, normalized=False, special=False) for role in ROLES])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_examples() -> Iterator[tuple[str, str]]:
    """Yield words, and the words backwards."""
    from reverse_text.words import make_words

    for word in islice(make_words("sft", MIN_LETTERS, MAX_LETTERS), EXAMPLES):
        yield word, word[::-1]


def write_examples(path: Path, examples: Iterable[tuple[str, ...]], system_prompt: str) -> None:
    """Write supervised examples as JSON lines of `messages`."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    with path.open("w", encoding="utf-8") as file:
        for texts in examples:
            turns = zip(cycle(["user", "assistant"]), texts, strict=False)
            messages = [*system, *({"role": role, "content": text} for role, text in turns)]
            file.write(json.dumps({"messages": messages}) + "\n")


def fine_tune(work: Path, recipe: Path, overrides: list[str]) -> Path:
    """Run `sft` and return the directory of its last published weights."""
    arguments = ["@", str(recipe), "--model.name", str(work / "random"), "--data.name", str(work / "examples.jsonl")]
    command = [str(Path(sys.executable).with_name("sft")), *arguments, "--output-dir", str(work / "run")]
    subprocess.run([*command, *overrides], check=True)
    return max((work / "run/weights").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def replace_model(trained: Path, output: Path) -> None:
    """Replace `output` by the published files, without the manifest of the run."""
    if output.exists():
        shutil.rmtree(output)
    shutil.copytree(trained, output, ignore=shutil.ignore_patterns("manifest.json"))
    for path in output.iterdir():
        path.chmod(0o644)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(__doc__, WarmStart(make_examples, ROOT / "configs/reverse_text"))
