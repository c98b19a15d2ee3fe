"""Compare our losses with those of public projects on random tensors; the limit for loss and gradient is 1e-5.

Calls TRL's `GRPOTrainer._compute_loss` on a stub of the trainer, and verl's registered policy losses. Neither is a
dependency; install them in a separate folder without their dependencies:

    uv pip install --target /tmp/public --no-deps trl==1.16.0 accelerate==1.15.0 verl==0.9.1 ray==2.60.0 pyvers==0.2.3 \
        tensordict==0.15.3 hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 codetiming==1.4.0 \
        orjson==3.13.0
    PYTHONPATH=/tmp/public .venv/bin/python benchmarks/public_losses.py [--json FILE]

`--json tests/unit/trainer/public_losses.json` writes tensors and public results for a unit test.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from prime_rl.configs.training.loss import LossConfig
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.train_step import Counts, ScoredRow

TOLERANCE = 1e-5
HORIZON = 12
# Spread of the log-ratios: wide exceeds the clipping bounds of a token, narrow those of a sequence mean.
WIDE, NARROW = 0.5, 2e-3

Answer = tuple[float, list[float]]
"""Loss, and its gradient by the log-probability of each trained token, sequence after sequence."""

# name -> (our loss, spread, public project, its settings)
CASES: dict[str, tuple[dict[str, Any], float, str, dict[str, Any]]] = {
    "grpo/trl": ({"type": "grpo", "eps_high": 0.28}, WIDE, "trl", {"loss_type": "grpo", "epsilon_high": 0.28}),
    "grpo_dual_clip/trl": ({"type": "grpo", "dual_clip": 1.5}, WIDE, "trl", {"loss_type": "grpo", "delta": 1.5}),
    "grpo_kl/trl": ({"type": "grpo", "kl": {"coef": 0.1}}, WIDE, "trl", {"loss_type": "grpo", "beta": 0.1}),
    "grpo_kl_importance/trl": (
        {"type": "grpo", "kl": {"coef": 0.1, "importance_weight": True}},
        WIDE,
        "trl",
        {"loss_type": "grpo", "beta": 0.1, "bias_correction": True},
    ),
    "ppo/trl": ({"type": "ppo", "eps_high": 0.28}, WIDE, "trl", {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo/trl": ({"type": "dr_grpo"}, WIDE, "trl", {"loss_type": "dr_grpo"}),
    "gspo/trl": (
        {"type": "gspo"},
        NARROW,
        "trl",
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo/trl": ({"type": "cispo", "eps_high": 0.5}, WIDE, "trl", {"loss_type": "cispo", "epsilon_high": 1.5}),
    "grpo/verl": (
        {"type": "grpo", "eps_high": 0.28, "dual_clip": 3.0},
        WIDE,
        "verl",
        {"name": "vanilla", "mode": "seq-mean-token-mean", "clip_ratio_high": 0.28},
    ),
    "ppo/verl": ({"type": "ppo", "dual_clip": 1.5}, WIDE, "verl", {"name": "vanilla", "clip_ratio_c": 1.5}),
    "dr_grpo/verl": (
        {"type": "dr_grpo", "dual_clip": 3.0},
        WIDE,
        "verl",
        {"name": "vanilla", "mode": "seq-mean-token-sum-norm"},
    ),
    "gspo/verl": (
        {"type": "gspo"},
        NARROW,
        "verl",
        {"name": "gspo", "mode": "seq-mean-token-mean", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    ),
    "cispo/verl": (
        {"type": "cispo", "eps_low": 0.2, "eps_high": 0.5},
        WIDE,
        "verl",
        {"name": "cispo", "clip_ratio_high": 0.5},
    ),
}


def draw(seed: int, spread: float) -> dict[str, list[list[float]]]:
    """Draw sequences of 1 to HORIZON tokens: log-probabilities of trainer, sampler and reference, and advantages."""
    random = np.random.default_rng(seed)
    lengths = [1, HORIZON, *random.integers(2, HORIZON, 4)]
    rows: dict[str, list[list[float]]] = defaultdict(list)
    for length in lengths:
        sampler = -random.exponential(1.5, length)
        # A common shift, so that a sequence mean exceeds its bounds often enough.
        trainer = sampler + random.normal(0, spread, length) + random.normal(0, spread / 2)
        rows["sampler"].append(sampler.astype(np.float32).tolist())
        rows["trainer"].append(trainer.astype(np.float32).tolist())
        rows["reference"].append((trainer + random.normal(0, 0.3, length)).astype(np.float32).tolist())
        rows["advantages"].append([float(np.float32(random.normal()))] * length)
    return dict(rows)


def ours(config: dict[str, Any], rows: dict[str, list[list[float]]]) -> Answer:
    """Compute our objective on the sequences packed into one row, each after a prompt token."""
    lengths = [len(sequence) for sequence in rows["trainer"]]
    mask = np.concatenate([[0, *[1] * n] for n in lengths])

    def lay(name: str) -> np.ndarray:
        # Values outside the mask are arbitrary.
        return np.concatenate([[np.nan, *sequence] for sequence in rows[name]]).astype(np.float32)

    row = make_micro_batch(
        np.zeros(len(mask), np.int64),
        mask,
        [n + 1 for n in lengths],
        logprobs=lay("sampler"),
        advantages=lay("advantages"),
        streams={"ref_logprobs": lay("reference")},
    )
    logprobs = torch.from_numpy(np.where(mask, lay("trainer"), 0).astype(np.float32)).requires_grad_()
    objective = build_objective(TypeAdapter(LossConfig).validate_python(config), seq_len=HORIZON)
    counts = Counts(tokens=sum(lengths), sequences=len(lengths))
    loss = objective(ScoredRow(row, logprobs, torch.zeros_like(logprobs), before_first_update=True, counts=counts)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient[row.loss_mask].tolist()


def pad(sequences: list[list[float]]) -> Tensor:
    """Return [sequences, HORIZON], padded with 0."""
    return torch.tensor([[*sequence, *[0.0] * (HORIZON - len(sequence))] for sequence in sequences])


def differentiate(loss_of: Callable[[Tensor, Tensor], Tensor], rows: dict[str, list[list[float]]]) -> Answer:
    """Return loss and gradient of `loss_of(logprobs, mask)` on padded sequences."""
    logprobs = pad(rows["trainer"]).requires_grad_()
    mask = pad([[1.0] * len(sequence) for sequence in rows["trainer"]])
    loss = loss_of(logprobs, mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient[mask.bool()].tolist()


def trl(
    rows: dict[str, list[list[float]]],
    loss_type: str,
    level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    bias_correction: bool = False,
) -> Answer:
    """Compute the loss of TRL's GRPO trainer from given log-probabilities of its model."""
    from trl import GRPOTrainer

    def loss_of(logprobs: Tensor, mask: Tensor) -> Tensor:
        same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        trainer: Any = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=bias_correction, steps_per_generation=1),
            model=SimpleNamespace(training=True),
            accelerator=same,
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            beta=beta,
            max_completion_length=HORIZON,
            current_gradient_accumulation_steps=1,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        batch = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": pad(rows["advantages"])[:, 0],
            "old_per_token_logps": pad(rows["sampler"]),
            "ref_per_token_logps": pad(rows["reference"]),
            "num_items_in_batch": mask.sum(),
        }
        answer: Tensor = GRPOTrainer._compute_loss(trainer, None, batch)
        return answer

    return differentiate(loss_of, rows)


def verl(rows: dict[str, list[list[float]]], name: str, mode: str = "token-mean", **settings: float) -> Answer:
    """Compute the policy loss that verl registers as `name`."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)

    def loss_of(logprobs: Tensor, mask: Tensor) -> Tensor:
        answer = get_policy_loss_fn(name)(
            old_log_prob=pad(rows["sampler"]),
            log_prob=logprobs,
            advantages=pad(rows["advantages"]),
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
        )
        loss: Tensor = answer[0]
        return loss

    return differentiate(loss_of, rows)


def main() -> int:
    """Compare all cases; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write tensors and public results to this file")
    path = parser.parse_args().json
    versions = {name: version(name) for name in ("trl", "verl")}
    recorded, worst = [], 0.0
    print(f"{versions}, largest of 5 draws\n{'case':22} {'|loss - loss|':>14} {'|grad - grad|':>14}")
    for case, (config, spread, project, settings) in CASES.items():
        gaps = np.zeros(2)
        for seed in range(5):
            rows = draw(seed, spread)
            loss, gradient = {"trl": trl, "verl": verl}[project](rows, **settings)
            our_loss, our_gradient = ours(config, rows)
            gaps = np.maximum(gaps, [abs(loss - our_loss), np.abs(np.subtract(gradient, our_gradient)).max()])
            if seed == 0:
                recorded.append(
                    {"case": case, "version": versions[project], "config": config, "settings": settings}
                    | {"rows": rows, "loss": loss, "gradient": gradient}
                )
        print(f"{case:22} {gaps[0]:14.1e} {gaps[1]:14.1e}")
        worst = max(worst, *gaps)
    if path:
        lines = ",\n".join(json.dumps(case) for case in recorded)
        path.write_text(f'{{"horizon": {HORIZON}, "cases": [\n{lines}\n]}}\n')
    print(f"largest difference {worst:.1e}, limit {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
