"""The canary: log-probabilities of a few fixed tokens, by which inference verifies the loaded weights (I5, I6)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.storage.weights.canary import canary_tokens, parse_canary
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.micro_batch import MicroBatch, make_micro_batch
from prime_rl.trainer.model.lora import add_adapters
from prime_rl.trainer.model.policy_model import PolicyModel, build_policy
from prime_rl.trainer.parallel.dtensor_slices import local_tensor
from prime_rl.trainer.parallel.process_group import World


def canary_row(vocabulary: int, tokens: NDArray[np.int64] | None = None) -> MicroBatch:
    """Return `tokens`, by default the canary of a vocabulary size, as a row."""
    tokens = canary_tokens(vocabulary) if tokens is None else tokens
    return make_micro_batch(tokens, np.arange(len(tokens)) > 0, [len(tokens)])


@torch.no_grad()
def measure_canary(policy: PolicyModel, row: MicroBatch) -> Callable[[], list[float]]:
    """Score the tokens of `row` at temperature 1, as training does. All ranks call it together.

    Returns a function that waits for the device and returns [T - 1], the log-probability of each token but the first.
    Any thread may call it; it does not wait for work that is queued later.
    """
    logprobs = policy(row)[0][1:]
    reshard_policy(policy)
    if not logprobs.is_cuda:
        return logprobs.tolist
    host = torch.empty_like(logprobs, device="cpu", pin_memory=True).copy_(logprobs, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return list(host.tolist())

    return read


def check_base_canaries(
    policy: PolicyModel, world: World, manifest: Mapping[str, Any], name: str, dtype: torch.dtype
) -> None:
    """Compare the untrained policy with the base model of each server that sampled batch 0. All ranks call it.

    `manifest` is that of batch 0, whose `base_canaries` are the servers' results, if any; `dtype` is the precision of
    the forward pass. Raises ConfigError if they differ by more than rounding or an entry is malformed, and RunError if
    the check failed on another rank.
    """
    error = None
    for entry in manifest.get("base_canaries", []):
        url = entry.get("url", "inference")
        problem = f"batch 0: base_canaries of {url} are malformed"
        with translate_error((ValueError, KeyError, TypeError), lambda error: ConfigError(f"{problem}: {error!r}")):  # noqa: B023
            ids = entry["token_ids"][: len(entry["logprobs"]) + 1]  # the server truncates to max_model_len
            served = parse_canary({"canary": {**entry, "token_ids": ids}})
        assert served is not None
        if max(served.token_ids) >= policy.vocabulary:
            raise ConfigError(
                f"model.name: inference at {url} has a larger vocabulary than {name}, which has {policy.vocabulary} "
                "tokens; give both the same model"
            )
        row = canary_row(policy.vocabulary, np.array(served.token_ids)).to(world.device)
        mine = replace(served, logprobs=tuple(measure_canary(policy, row)()), dtype=str(dtype).removeprefix("torch."))
        compared = mine.compare(served.logprobs, served.dtype, entry.get("tolerance"))
        if not compared.passes and error is None:
            error = ConfigError(
                f"model.name: version 0 of inference at {url} is not the trainer's {name}: the {compared.which} "
                f"difference between log-probabilities of its canary is {compared.difference:.3g}, more than "
                f"{compared.tolerance:.3g}; check that both load the same files, and set model.max_model_len to the "
                "server's max_model_len"
            )
    world.raise_on_all_ranks(error, "the comparison with version 0 of inference")


def unsharded_copy(
    policy: PolicyModel, config: TrainerModelConfig, world: World, dtype: torch.dtype
) -> PolicyModel | None:
    """Build an unsharded copy of the model that shares the storage of the sharded policy's weights.

    A sharded policy cannot run two forward passes at once, because gathered weights are part of its state. On a CPU the
    writer thread therefore scores the canary with this copy while the next step runs; only updates must wait. None if
    there are several ranks, if forward uses another dtype than the weights, or on CUDA, which runs the passes one after
    the other anyway.
    """
    if world.size > 1 or world.device.type != "cpu":
        return None
    if any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in policy.parameters()):
        return None
    copy = build_policy(config)
    if config.lora is not None:
        add_adapters(copy, config.lora, dtype)
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        local = local_tensor(parameter)
        copy.get_submodule(owner)._parameters[leaf] = nn.Parameter(local.detach(), requires_grad=False)
    for name, buffer in policy.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        copy.get_submodule(owner)._buffers[leaf] = buffer
    return copy
