"""Specification of one run of the pipeline benchmark, which its processes read."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pipeline_model import Trace, Workload
from simulation import Policy

FILE = "spec.json"
RECORD = "engine.json"
"""What the engine's process writes at the end: ends of the training steps, and how long it sampled."""

TOKENS_PER_TOKEN = 32
"""Tokens of the trace that one token of the replay stands for: the seconds are the trace's, the work is less."""


@dataclass(frozen=True)
class Spec:
    """One policy on one trace.

    Attributes:
        policy: the policy, as in the simulation.
        workload: the trace's workload, with t_infer and t_train of this run.
        seed: seed of the trace, the orchestrator's stream and its requests.
        root: run directory.
    """

    policy: Policy
    workload: Workload
    seed: int
    root: Path

    @property
    def trace(self) -> Trace:
        """Return the trace."""
        return Trace(self.workload, self.seed)

    def write(self) -> None:
        """Write the specification into the run directory."""
        self.root.mkdir(parents=True)
        (self.root / FILE).write_text(json.dumps({**asdict(self), "root": str(self.root)}))

    @classmethod
    def read(cls, root: Path) -> Self:
        """Read the specification from the run directory."""
        saved = json.loads((root / FILE).read_text())
        return cls(Policy(**saved["policy"]), Workload(**saved["workload"]), saved["seed"], Path(saved["root"]))


def replayed_tokens(tokens: int) -> int:
    """Return the number of replayed tokens for a length of the trace, at least 1."""
    return -(-tokens // TOKENS_PER_TOKEN)
