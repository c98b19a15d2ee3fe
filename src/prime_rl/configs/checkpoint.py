"""`ckpt`: checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig, common

SKIPPED = ("skip_optimizer", "skip_scheduler", "skip_progress", "skip_dataloader")
"""Keys that exclude a part of the state from a resume."""


class CkptConfig(BaseConfig):
    """Checkpoints, from which a run can resume. Off unless this block is given."""

    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds"}

    path: Path = Path("checkpoints")
    """Directory of the checkpoints, relative to output_dir unless absolute."""

    interval: int = Field(50, ge=1, json_schema_extra=common("Checkpoints"))
    """Steps between two checkpoints; the last step is always saved."""

    save_async: bool = False
    """Continue training while a checkpoint is written."""

    timeout_seconds: float = Field(3600, gt=0)
    """Timeout for writing one checkpoint."""

    resume_step: int | None = Field(None, ge=-1, json_schema_extra=common("Checkpoints"))
    """Checkpoint to resume from; -1 is the latest complete one, None starts a new run."""

    keep_last: int | None = Field(None, ge=1, json_schema_extra=common("Checkpoints"))
    """Number of checkpoints to keep; None keeps all."""

    keep_interval: int | None = Field(None, ge=1)
    """Never delete checkpoints at multiples of this many steps; needs keep_last."""

    # Upstream's names.
    skip_optimizer: bool = False
    """Resume without the optimizer's state, which starts empty; allows another optim.type."""

    skip_scheduler: bool = False
    """Start the learning rate schedule over at the resumed step, with the rest of max_steps as its length."""

    skip_progress: bool = False
    """Count tokens, samples and problems from 0. The step is kept: it numbers batches, versions and checkpoints."""

    skip_dataloader: bool = False
    """Read the training data from the start, or other data. `sft` only: `rl` resumes the batches of the checkpoint."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `keep_interval` without `keep_last`, and what to skip without `resume_step`."""
        if self.keep_last is None:
            yield "keep_interval", "has no effect without ckpt.keep_last: all checkpoints are kept"
        for key in SKIPPED if self.resume_step is None else ():
            yield key, "has no effect without ckpt.resume_step"
