"""The orchestrator's parts of checkpoints that are not due, for a trainer that is stopped between two of them.

A trainer that stops saves checkpoint N before batch N, the next that it would train on. The orchestrator's part is the
state before batch N - 1 was shipped, so it must be kept until the trainer has trained on that batch.
"""

from collections.abc import Callable

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.orchestrator_checkpoint import OrchestratorState, write_checkpoint_part
from prime_rl.storage.artifact import MANIFEST
from prime_rl.storage.checkpoint_artifacts import ORCHESTRATOR, read_stop


class StopCheckpoints:
    """Keeps the states after the newest batches, at most k + 2 of them, and writes them on request.

    Without checkpoints it keeps nothing. Saved groups are shared with the batches, so a state costs little memory.
    """

    def __init__(self, config: OrchestratorConfig, branch: int) -> None:
        """Start without states."""
        self._config, self._branch = config, branch
        self._states: dict[int, Callable[[], OrchestratorState]] = {}

    def keep(self, step: int, state: Callable[[], OrchestratorState], published: int) -> None:
        """Keep the state of checkpoint `step`, and forget those below the newest version, `published`."""
        self._states = {kept: build for kept, build in self._states.items() if kept >= published}
        self._states[step] = state

    def answer(self) -> None:
        """Write the part of the checkpoint with which the trainer stops, if it does. Blocks. Raises RunError."""
        if self._config.ckpt is not None:
            stop = read_stop(self._config.run_paths.root / self._config.ckpt.path)
            if stop is not None and stop.step is not None and stop.branch == self._branch:
                self.write(stop.step)

    def write(self, wanted: int | None = None) -> None:
        """Write the part of checkpoint `wanted`, or of all kept ones, if its batch is shipped. Blocks. Raises RunError.

        A part that exists already is not replaced: the trainer may be committing it.
        """
        config, states = self._config, self._states
        if config.ckpt is None:
            return
        for step in sorted(states if wanted is None else states.keys() & {wanted}):
            checkpoint = config.run_paths.root / config.ckpt.path / f"step_{step}"
            manifest = config.run_paths.rollouts(step - 1) / MANIFEST
            if manifest.exists() and not (checkpoint / ORCHESTRATOR).exists():
                write_checkpoint_part(checkpoint, states.pop(step)(), self._branch, manifest, config)
