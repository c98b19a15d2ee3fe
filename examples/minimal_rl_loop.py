"""The whole of reinforcement learning in one file: sample, score, advantages, pack, train, hand the weights back.

    uv run --extra cpu python examples/minimal_rl_loop.py

One process on a CPU instead of three: Hugging Face's `generate` takes the place of vLLM, and a function call that of
the run directory. Everything else is what `rl` uses: batches, advantages, losses and the training step. The small model
of configs/reverse_text learns to reverse words.

`--async-level 2` samples every batch with weights that are two versions old, as a real asynchronous run does. The loss
corrects for it: it knows the log-probability that the sampler gave each token, and clips the ratio.
"""

import argparse
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from reverse_text.scores import lcs_ratio
from reverse_text.words import make_words
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.types import Group, Rollout, Sample
from prime_rl.orchestrator.algorithms.advantages import Scores, grpo
from prime_rl.orchestrator.packing import pack
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World, join_world
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.train_step import StepResult, TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy

MODEL = "configs/reverse_text/model"
SEQ_LEN = 4096
MAX_NEW_TOKENS = 8
TEMPERATURE = 1.0


@dataclass(frozen=True)
class Settings:
    """What the command line sets."""

    steps: int
    async_level: int
    groups: int
    rollouts: int
    minibatches: int
    lr: float
    seed: int


def main() -> None:
    """Train, and print a line per step."""
    settings = parse_arguments()
    for step, reward, staleness, result in train(settings):
        print(
            f"step {step:3}  reward {reward:.3f}  staleness {staleness}  loss {result.loss or 0:+.4f}  "
            f"entropy {result.means['entropy'] or 0:.3f}"
        )


def train(settings: Settings) -> Iterator[tuple[int, float, int, StepResult]]:
    """Train step by step.

    Yields:
        The step n, the mean reward of its batch, the staleness of the batch, and what the trainer reports.
    """
    torch.manual_seed(settings.seed)
    disable_progress_bar()
    model = TrainerModelConfig(name=MODEL, seq_len=SEQ_LEN)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sampler = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    words = make_words(settings.seed, min_letters=3, max_letters=5)
    with join_world("cpu", timeout_seconds=600, model=model) as world:
        policy = make_policy(model, settings.seed, world)
        optimizer = build_optimizer(AdamWConfig(lr=settings.lr), policy)
        engine = TrainStep(policy, optimizer, world, max_norm=1.0)
        objective = build_objective(AIPOLossConfig(), SEQ_LEN)
        # The last k + 1 versions, oldest first; version n is the policy before step n.
        versions = deque([(0, published(policy))], maxlen=settings.async_level + 1)
        for step in range(settings.steps):
            version, weights = versions[0]
            sampler.load_state_dict(weights)
            batch_words = list(islice(words, settings.groups))
            groups = sample_groups(sampler, tokenizer, batch_words, version, settings.rollouts)
            result = train_on(groups, step, engine, objective, world, settings)
            versions.append((step + 1, published(policy)))
            reward = float(np.mean([group.rewards for group in groups]))
            yield step, reward, step - version, result


@torch.inference_mode()
def sample_groups(
    sampler: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, words: list[str], version: int, num_rollouts: int
) -> list[Group]:
    """Sample G answers to every word and score them: one group per word."""
    chats = [[{"role": "user", "content": word}] for word in words for _ in range(num_rollouts)]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    output = sampler.generate(
        **prompts,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    completions = output.sequences[:, prompts["input_ids"].shape[1] :]
    # [B, T]: the log-probability that the sampler gave each new token, at the sampling temperature.
    logprobs = torch.stack(output.logits, 1).float().div(TEMPERATURE).log_softmax(-1)
    logprobs = logprobs.gather(-1, completions[..., None])[..., 0]
    end = sampler.generation_config.eos_token_id
    groups = []
    for number, word in enumerate(words):
        rollouts = []
        for row in range(number * num_rollouts, (number + 1) * num_rollouts):
            prompt = prompts["input_ids"][row][prompts["attention_mask"][row] != 0].tolist()
            completion = until_end(completions[row].tolist(), end)
            chosen = logprobs[row, : len(completion)].tolist()
            rollouts.append(make_rollout(tokenizer, prompt, completion, chosen, word, version))
        groups.append(Group(number, tuple(rollouts), env="reverse_text", example=number, temperature=TEMPERATURE))
    return groups


def until_end(tokens: list[int], end: int) -> list[int]:
    """Cut a completion after its first end token; `generate` pads shorter completions."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def make_rollout(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    word: str,
    version: int,
) -> Rollout:
    """Score a completion, and record its tokens with mask, log-probabilities and versions."""
    given = len(prompt)
    text = tokenizer.decode(completion, skip_special_tokens=True)
    sample = Sample(
        tokens=np.array(prompt + completion, np.int32),
        loss_mask=np.array([False] * given + [True] * len(completion)),
        logprobs=np.array([0.0] * given + logprobs, np.float32),
        versions=np.array([-1] * given + [version] * len(completion), np.int32),
    )
    return Rollout(
        samples=(sample,),
        reward=lcs_ratio(text.strip(), word[::-1]),
        metrics={},
        is_truncated=len(completion) == MAX_NEW_TOKENS,
        text=(("user", word), ("assistant", text)),
    )


def train_on(
    groups: list[Group], step: int, engine: TrainStep, objective: object, world: World, settings: Settings
) -> StepResult:
    """Turn groups into a packed batch, and take the optimizer steps of step n."""
    advantages = [grpo(Scores(group.rewards, group.lengths)) for group in groups]
    batch = pack(groups, advantages, SEQ_LEN)
    minibatches = split_batch(batch, step, settings.minibatches, world, max_tokens=SEQ_LEN)
    return engine.step(minibatches, objective, factor=1.0)


def published(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Return a copy of the policy's weights under the names of the Hugging Face model."""
    return copy.deepcopy(
        {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in policy.causal_lm.state_dict().items()
        }
    )


def parse_arguments() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--async-level", type=int, default=0, help="how many versions old the sampler's weights are")
    parser.add_argument("--groups", type=int, default=64, help="examples per batch")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts per example")
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer steps per batch")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
