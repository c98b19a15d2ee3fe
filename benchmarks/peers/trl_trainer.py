"""TRL's GRPOTrainer on a recipe of this benchmark; runs in TRL's environment. See trl.py.

Writes a line {"time": Unix seconds, "reward": mean reward of a batch} per batch of rollouts.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from long_text import make_prompts, vowel_share
from reverse_text.scores import lcs_ratio
from reverse_text.words import make_words
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MINIBATCHES, GROUP = 4, 8


class RewardLog(TrainerCallback):
    """Appends the mean reward of each batch to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Write a line, except for the summary at the end."""
        if "reward" in logs:
            with self._file.open("a") as file:
                file.write(json.dumps({"time": time.time(), "reward": float(logs["reward"])}) + "\n")


def reversed_word(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Return the reward of the environment `reverse_text`."""
    pairs = zip(prompts, completions, strict=True)
    return [lcs_ratio(prompt[-1]["content"][::-1], completion[-1]["content"]) for prompt, completion in pairs]


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """Return the reward of the environment `long_text`."""
    return [vowel_share(completion[-1]["content"]) for completion in completions]


def main() -> None:
    """Train with the same model, prompts, rewards, batch, minibatches and rate as the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--recipe", choices=("short", "long"), required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--min-tokens", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--warmup", type=int, required=True, help="batches")
    arguments = parser.parse_args()

    short = arguments.recipe == "short"
    words = list(islice(make_words(0, 3, 4), 20_000)) if short else make_prompts()
    config = GRPOConfig(
        output_dir=str(arguments.output_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.batch_size // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        num_generations=GROUP,
        max_completion_length=arguments.max_tokens,
        generation_kwargs={"min_new_tokens": arguments.min_tokens} if arguments.min_tokens else None,
        max_steps=arguments.batches * MINIBATCHES,
        logging_steps=MINIBATCHES,
        learning_rate=arguments.learning_rate,
        adam_beta2=0.95,
        lr_scheduler_type="linear",
        warmup_steps=arguments.warmup * MINIBATCHES,
        beta=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model),
        processing_class=tokenizer,
        reward_funcs=reversed_word if short else vowels,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": word}]} for word in words]),
        callbacks=[RewardLog(arguments.log)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
