"""Verifies at startup that packing is invisible (I8), on the loaded model and its training code.

Architectures that mix packed samples cannot be listed completely, so each run tests its own model. Two random samples
are scored in one row and alone, and the second also behind another first sample:

    row 1: first, second      row 2: other, second      row 3: first      row 4: second

The second sample must be equal in rows 1 and 2, and both must be equal to rows 3 and 4 up to rounding. Where the rows
are long enough, the second sample exceeds the lengths at which rotary frequencies and attention change
(`original_max_position_embeddings`, `sliding_window`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.fsdp import compute_dtype, reshard_policy
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.model.varlen_attention import rope_parameters
from prime_rl.trainer.parallel.device_mesh import local_tensor
from prime_rl.trainer.parallel.process_group import World

_FIRST, _SECOND = 24, 64
"""Tokens of the two samples."""
_LEAK = 32
"""Tokens of the second sample that are compared behind two different first samples: those next to it."""
_LARGEST_FLOAT32 = 1e-3
_MEAN_HALF = 5e-2
_MEAN_HALF_SAME_SHAPE = 2e-2


@dataclass(frozen=True, slots=True)
class PackingDifference:
    """Absolute differences of log-probabilities of packed samples."""

    others: Tensor  # [tokens], of a sample behind two different samples in rows of the same shape
    alone: Sequence[Tensor]  # [tokens], of each sample packed and alone

    def excess(self, dtype: torch.dtype, is_moe: bool) -> str | None:
        """Describe the difference if rounding in `dtype` does not explain it; None if it does.

        Half precision compares means, because the order of summation depends on the row's length. Rows of the same
        shape have a lower limit, except with experts, where rounding can change the routing.
        """
        exact = dtype == torch.float32
        same_shape = _MEAN_HALF if is_moe else _MEAN_HALF_SAME_SHAPE
        compared = [(self.others, same_shape, "with the other samples of its row")]
        compared += [(values, _MEAN_HALF, "from those alone") for values in self.alone]
        for values, half, what in compared:
            found, limit = (values.max(), _LARGEST_FLOAT32) if exact else (values.mean(), half)
            if not found.item() <= limit:  # also if it is NaN
                statistic = "largest" if exact else "mean"
                return f"change {what} ({statistic} difference {found.item():.3g}, limit {limit:g})"
        return None


def check_packing(policy: PolicyModel, config: TrainerModelConfig, world: World, max_tokens: int) -> None:
    """Score samples packed and alone in rows of at most `max_tokens`. All ranks call it together.

    The policy is sharded and loaded. Raises ConfigError if the log-probabilities differ by more than rounding, and
    RunError if they do on another rank.
    """
    lengths = _lengths(policy, max_tokens)
    if lengths is None:
        return
    with torch.compiler.set_stance("force_eager"):  # compiling for these lengths would be slow
        difference = measure_packing(policy, world.device, lengths)
    excess = difference.excess(compute_dtype(config.dtype, world.device), policy.routing.is_moe)
    error = None
    if excess is not None and (name := _find_non_finite(policy)) is not None:
        error = ConfigError(
            f"model.name: the weights of {config.name} are not finite: {name} contains NaN or infinity; replace it"
        )
    elif excess is not None:
        error = ConfigError(
            f"model.name: the log-probabilities that {config.name} gives to packed samples {excess}: it carries state "
            "from one sample to the next, or depends on the length of the row, and cannot be trained on packed rows; "
            "use a model that docs/training.md lists"
        )
    world.raise_on_all_ranks(error, "the check that packing is invisible")


@torch.no_grad()
def _find_non_finite(policy: PolicyModel) -> str | None:
    """Return the name of a parameter of which this rank's part is not finite; None if there is none."""
    parts = ((name, local_tensor(parameter)) for name, parameter in policy.causal_lm.named_parameters())
    return next((name for name, part in parts if not torch.isfinite(part).all()), None)


@torch.no_grad()
def measure_packing(policy: PolicyModel, device: torch.device, lengths: tuple[int, int]) -> PackingDifference:
    """Score the four rows with samples of `lengths` tokens, without synchronising with the device."""
    random = np.random.default_rng(policy.vocabulary)
    first, other, second = (random.integers(0, policy.vocabulary, lengths[i]) for i in (0, 0, 1))
    rows: list[Sequence[NDArray[np.int64]]] = [(first, second), (other, second), (first,), (second,)]
    packed, behind_other, *alone = (_score(policy, device, row) for row in rows)
    pairs = zip(packed.split(lengths), alone, strict=True)
    return PackingDifference(
        others=(packed - behind_other)[lengths[0] + 1 :][:_LEAK].abs(),
        alone=[(in_row - by_itself)[1:].abs() for in_row, by_itself in pairs],  # the first token has no probability
    )


def _score(policy: PolicyModel, device: torch.device, samples: Sequence[NDArray[np.int64]]) -> Tensor:
    mask = np.concatenate([np.arange(len(sample)) > 0 for sample in samples])
    row = make_micro_batch(np.concatenate(samples), mask, [len(sample) for sample in samples])
    logprobs = policy(row.to(device))[0]
    reshard_policy(policy)
    return logprobs


def _lengths(policy: PolicyModel, max_tokens: int) -> tuple[int, int] | None:
    """Tokens of the first and second sample; None if two samples do not fit into a row."""
    text = policy.causal_lm.config.get_text_config()
    scaled = [parameters.get("original_max_position_embeddings") for parameters in rope_parameters(text)]
    first = min(_FIRST, max_tokens // 4, *(length // 2 for length in scaled if length))
    longest = min(max_tokens - first, policy.max_sample_length or max_tokens)
    if first < 2 or longest < 2:
        return None
    windows = {getattr(layer, "sliding_window", None) for layer in text.per_layer_config}
    changes = [length + _SECOND // 2 for length in (*scaled, *windows) if length]
    return first, min(max(_SECOND, *(length for length in changes if length <= longest), 0), longest)
