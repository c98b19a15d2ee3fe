"""Simulates an orchestrator that writes a ledger: random draws, ends and ships, with real files.

As a program (`python -m tests.unit.orchestrator.ledger_player ROOT SEED`) it resumes what it finds, prints a line after
each ship and goes on until it is killed.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from prime_rl.configs.buffer import CurriculumBufferConfig, DifficultyPoolBufferConfig
from prime_rl.core.types import Group, Rollout, Sample
from prime_rl.orchestrator.example_stream import ExampleStream, StreamEnvironment
from prime_rl.orchestrator.ledger.ledger import Ledger, read_ledger
from prime_rl.orchestrator.ledger.ledger_records import Dropped, Shipped
from prime_rl.storage.artifact import publish_artifact
from prime_rl.storage.paths import RunPaths

BATCH, LOOKAHEAD, IN_FLIGHT, LEVEL = 3, 4, 6, 1


def make_stream(seed=0):
    pools = DifficultyPoolBufferConfig(easy_fraction=0.3, hard_fraction=0.3)
    weights = CurriculumBufferConfig(import_path="examples.extend.curriculum:uncertain_first")
    sources = [("a", 7, 1.0, pools), ("b", 5, 2.0, weights), ("c", 3, 0.5, pools)]
    return ExampleStream([StreamEnvironment(*source) for source in sources], seed)


def make_group(group_id, rewards=(0.5, 1.0), version=0, length=3, text="x"):
    def rollout(reward):
        tokens = np.arange(group_id, group_id + length, dtype=np.int32)
        mask = np.arange(length) > 0
        logprobs = np.linspace(-1, 0, length, dtype=np.float32)
        sample = Sample(tokens, mask, logprobs, np.where(mask, version, -1).astype(np.int32))
        conversation = (("user", text), ("assistant", f"{group_id}"))
        return Rollout((sample, sample), reward, {"exact": reward, "odd": float("nan")}, False, conversation)

    return Group(group_id, tuple(rollout(reward) for reward in rewards), "a", group_id % 7, 0.7)


class LedgerPlayer:
    """The ledger calls of an orchestrator, without rollouts."""

    def __init__(self, root, rng):
        self.paths, self.rng = RunPaths(Path(root)), rng
        self.flushed_sizes = []
        stream = make_stream()
        state = read_ledger(self.paths, 0)
        if state is None:
            self.ledger = Ledger.start(self.paths, 0, stream)
            self.waiting, self.running, self.finished = [], [], []
        else:
            self.ledger = Ledger.resume(self.paths, stream, state)
            self.waiting = [draw.group_id for draw in state.positions.waiting]
            self.running = [draw.group_id for draw in state.positions.unfinished]
            self.finished = list(state.finished)
            for group_id in self.running:
                self._issue(group_id)

    @property
    def step(self):
        return self.ledger.positions.next_step

    def move(self):
        """Draw, dispatch, finish or drop a position."""
        while len(self.waiting) < LOOKAHEAD:
            self.waiting.append(self.ledger.draw().group_id)
        while len(self.running) + len(self.finished) < IN_FLIGHT:
            group_id = self.waiting.pop(self.rng.integers(len(self.waiting)))
            self._issue(group_id)
            self.running.append(group_id)
            self.waiting.append(self.ledger.draw().group_id)
        group_id = self.running.pop(self.rng.integers(len(self.running)))
        rewards = self.rng.choice([0.0, 0.5, 1.0], 2)
        kind = self.rng.random()
        if kind < 0.15:
            self.ledger.dropped(group_id, "error/a")
        elif kind < 0.3:
            self.ledger.dropped(group_id, "filter/difficulty", rewards)
        else:
            self.ledger.done(make_group(group_id, tuple(rewards), self.step))
            self.finished.append(group_id)

    async def ship(self):
        """Ship a batch as the orchestrator does: flush, rename, record."""
        step, group_ids = self.step, sorted(self.finished[:BATCH])
        await self.ledger.flush()
        self.flushed_sizes.append(self.paths.ledger(0).stat().st_size)
        await asyncio.to_thread(
            publish_artifact, self.paths.rollouts(step), lambda _: {"branch": 0, "group_ids": group_ids}
        )
        self.ledger.shipped(step, group_ids)
        self.finished = self.finished[BATCH:]

    async def play(self, ships):
        """Continue until this many more batches are shipped."""
        last = self.step + ships
        while self.step < last:
            while len(self.finished) < BATCH or self.rng.random() < 0.3:
                if len(self.finished) >= IN_FLIGHT:
                    break
                self.move()
            await self.ship()

    def _issue(self, group_id):
        self.ledger.issued(group_id, self.step, self.step + LEVEL)


def shipped(state):
    """Step -> group_ids in the records."""
    return {record.step: record.group_ids for record in state.records if isinstance(record, Shipped)}


def fates(state):
    """Pairs of position and its fate: shipped, dropped, finished, unfinished or waiting."""
    return [
        *((group_id, "shipped") for group_ids in shipped(state).values() for group_id in group_ids),
        *((record.group_id, "dropped") for record in state.records if isinstance(record, Dropped)),
        *((group_id, "finished") for group_id in state.finished),
        *((draw.group_id, "unfinished") for draw in state.positions.unfinished),
        *((draw.group_id, "waiting") for draw in state.positions.waiting),
    ]


def manifests(paths):
    """Step -> group_ids as the trainer reads them."""
    found = {}
    for path in paths.rollouts_dir.glob("step_*"):
        found[int(path.name[5:])] = json.loads((path / "manifest.json").read_text())["group_ids"]
    return found


async def _main(root, seed):
    player = LedgerPlayer(root, np.random.default_rng(seed))
    while True:
        await player.play(1)
        print(player.step, flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
