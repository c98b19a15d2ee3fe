"""Loading the trainer's part of a checkpoint in place, and saying in one line what torch's reader or writer met."""

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from prime_rl.errors import RunError
from prime_rl.trainer.checkpoints import state
from prime_rl.trainer.checkpoints.reader import TensorReader


def load_model_and_optimizer(
    part: Path, policy: nn.Module, optimizer: Optimizer | None, group: dist.ProcessGroup | None = None, hint: str = ""
) -> None:
    """Fill a policy, and its optimizer unless None, from the trainer's part of a checkpoint, in place.

    Raises:
        ConfigError: the checkpoint is of another model; `hint` says why that may be.
        RunError: it is damaged.
    """
    reader = TensorReader(part)
    metadata = reader.read_metadata()
    model = state.model_tensors(policy)
    state.check_model(model, metadata, str(part), hint)
    moments = state.empty_optimizer_tensors(policy, metadata) if optimizer is not None else {}
    try:
        dcp.load({**model, **moments}, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as error:
        raise RunError(f"cannot load {part}: {reason(error)}") from error
    if optimizer is not None:
        state.restore_optimizer(policy, optimizer, moments)


def reason(error: BaseException) -> str:
    """One line: the first rank's first cause, for a failure that several ranks may have."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {reason(cause)}"
    if isinstance(error, OSError):
        said = error.strerror or str(error)
        return f"{said}: {error.filename}" if error.filename else said
    line = str(error).strip().split("\n")[0] or type(error).__name__
    # What torch's writer says of a write that ended early; the disk's own error does not get through it.
    return f"the disk did not take a whole file ({line})" if "inline_container" in line else line
