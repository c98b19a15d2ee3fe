"""Several adapters over one policy: gradients as of torch and peft alone, on any number of ranks (I9)."""

import numpy as np
import peft
import pytest
import torch
import transformers

from prime_rl.configs.training.model import LoRAConfig, TrainerModelConfig
from prime_rl.trainer.adapter_engine import Job, run_jobs, sum_gradients, update
from prime_rl.trainer.micro_batch import TargetRow
from prime_rl.trainer.model.lora import Adapter, adapter_rooms
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.unit.trainer.world import run_world

MODELS = ({"rank": 4, "alpha": 32.0, "lengths": (7, 12, 3)}, {"rank": 2, "alpha": 8.0, "lengths": (5,)})
"""The second model has fewer rows than ranks."""


def make_samples(index):
    """Return tokens, targets and weights of each sample of a model; weights may be negative."""
    random = np.random.default_rng(index)
    return [
        (*random.integers(0, VOCAB_SIZE, (2, length)), random.standard_normal(length))
        for length in MODELS[index]["lengths"]
    ]


def randomize(factors, index):
    """Replace zeros, which would hide the gradients of A."""
    random = np.random.default_rng(100 + index)
    for name in sorted(factors):
        for factor in factors[name]:
            factor.data = torch.from_numpy(random.standard_normal(factor.shape).astype(np.float32) * 0.05)


def row_loss(samples, rank_rows):
    def loss(policy, row):
        rank_rows.append(row)
        tokens, targets, weights = (np.zeros(1, np.int64),) * 3 if row is None else samples[row]
        length = len(tokens)
        scored = TargetRow(
            tokens=torch.tensor(tokens),
            position_ids=torch.arange(length),
            boundaries=torch.tensor([0, length], dtype=torch.int32),
            longest=length,
            positions=torch.arange(length),
            targets=torch.tensor(targets),
        )
        (logprobs,) = policy(scored)
        return -(logprobs * torch.tensor(weights)).sum()

    return loss


def train(world, path):
    """Return the gradients of both models by factor, their norms, and the factors after an update."""
    lora = LoRAConfig(rank=8)
    policy = make_policy(TrainerModelConfig(name=str(path), lora=lora), 0, world, shared=True)
    rooms, jobs, rank_rows = adapter_rooms(policy), [], []
    for index, model in enumerate(MODELS):
        config = LoRAConfig(rank=model["rank"], alpha=model["alpha"])
        adapter = Adapter(rooms, config, seed=index, device=world.device)
        randomize(adapter.factors, index)
        samples = make_samples(index)
        jobs.append(Job(adapter, [float(len(s[0])) for s in samples], row_loss(samples, rank_rows)))
    run_jobs(policy, world, jobs)
    answers = []
    for job in jobs:
        optimizer = torch.optim.AdamW(job.adapter.parameters, lr=0.1, betas=(0.0, 0.9), weight_decay=0.0)
        norm = sum_gradients(job.adapter, world)
        gradients = {name: [f.grad.tolist() for f in pair] for name, pair in job.adapter.factors.items()}
        assert update(job.adapter, optimizer, norm)
        factors = {name: [f.tolist() for f in pair] for name, pair in job.adapter.factors.items()}
        answers.append([gradients, norm, factors])
    return [answers, len(rank_rows)]


def train_both(world, paths):
    return [train(world, path) for path in paths]


def peft_gradients(path, index, rooms):
    """Return the gradients of a model by factor, computed by transformers and peft."""
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = MODELS[index]
    config = peft.LoraConfig(r=model["rank"], lora_alpha=model["alpha"], target_modules=sorted(rooms))
    adapted = peft.get_peft_model(base, config)
    factors = {}
    for name in rooms:
        layer = adapted.get_submodule(f"base_model.model.{name}")
        factors[name] = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    randomize(factors, index)
    total = torch.zeros(())
    for tokens, targets, weights in make_samples(index):
        logits = adapted(input_ids=torch.tensor(tokens)[None]).logits[0].float()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
        total = total - (logprobs * torch.tensor(weights, dtype=torch.float32)).sum()
    total.backward()
    return {name: [factor.grad.numpy() for factor in pair] for name, pair in factors.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with tied embeddings, and one without."""
    root = tmp_path_factory.mktemp("models")
    return [str(make_tiny_model(root / str(tied), tie_word_embeddings=tied)) for tied in (True, False)]


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_equal_those_of_peft_on_any_world(size, models, tmp_path):
    ranks = run_world(size, train_both, models, tmp_path)
    for number, path in enumerate(models):
        answers = [rank[number] for rank in ranks]
        assert len({num_rows for _, num_rows in answers}) == 1  # a rank with fewer passes would stop the others
        for index in range(len(MODELS)):
            gradients, norm, factors = answers[0][0][index]
            assert len(gradients) == 2 * 7 + 1
            expected = peft_gradients(path, index, gradients)
            for name, pair in expected.items():
                for got, wanted in zip(gradients[name], pair, strict=True):
                    np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg=name)
            flat = np.concatenate([g.ravel() for pair in expected.values() for g in pair])
            assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-5)
            assert all(answer[index] == [gradients, norm, factors] for answer, _ in answers)
