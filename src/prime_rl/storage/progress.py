"""The progress of a run, which survives resumes, restarts and rollbacks.

The trainer stores it in its checkpoints, the orchestrator in the manifest of each batch: the batches that precede a
step are the same after each of them.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np

from prime_rl.storage.artifact import MANIFEST
from prime_rl.storage.batch import Batch
from prime_rl.storage.paths import RunPaths


@dataclass(slots=True)
class Progress:
    """Progress of a run: steps done, and tokens (prompts included), sequences and groups of all batches."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    problems: int = 0

    def count(self, tokens: int, samples: int, problems: int = 0) -> None:
        """Add one step."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples
        self.problems += problems

    def count_batch(self, batch: Batch) -> None:
        """Add the step of a batch."""
        self.count(len(batch.tokens), len(batch.seq_lens), len(np.unique(batch.sample_group)))

    def metrics(self) -> dict[str, float]:
        """Return `progress/<name>`."""
        return {f"progress/{name}": value for name, value in asdict(self).items()}


def read_progress(paths: RunPaths, step: int) -> Progress:
    """Return the progress before batch `step`; without totals if an earlier version wrote the batch before it."""
    if step > 0:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Progress(**json.loads((paths.rollouts(step - 1) / MANIFEST).read_bytes())["progress"])
    return Progress(step)
