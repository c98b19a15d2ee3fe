"""From a position of the stream to a finished group, or to a drop that has a name.

I1 a group's deadline counts from the version that its server samples from at its dispatch; I2 every group that is
dispatched ends exactly once, kept or dropped for a reason that is counted; I3 each step of it is in the ledger.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.admission import LengthHistory, Lookahead
from prime_rl.orchestrator.advantages import Scores, degenerate
from prime_rl.orchestrator.checkpoint import Cut
from prime_rl.orchestrator.drops import Drops, Verdict
from prime_rl.orchestrator.engine import EngineError, EngineLost, sampling_parameters
from prime_rl.orchestrator.filters import DIFFICULTY, OVERLONG, is_off_difficulty, is_overlong
from prime_rl.orchestrator.ledger import Finished, Ledger
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.report import Tally
from prime_rl.orchestrator.reward_shaping import shape_rewards
from prime_rl.orchestrator.scheduler import DeadlineScheduler
from prime_rl.orchestrator.server import Server
from prime_rl.orchestrator.stream import Draw
from prime_rl.orchestrator.workers.failures import EnvironmentFailed, SampleTooLong
from prime_rl.orchestrator.workers.pool import EnvironmentPool
from prime_rl.types import Group, Rollout

ZERO_ADVANTAGE = "zero_advantage"
"""Reason of a group whose rollouts all have the same reward: it teaches nothing."""

ENGINE = "error/engine"
"""Reason of a group that the servers failed to sample, again and again, while they could be reached."""

_MOST_RETRIES = 10
"""Servers that one group may lose; more, and the fault is not theirs."""
_MOST_FAULTS = 2
"""Failures of servers that one group may meet; more, and it is dropped."""


@dataclass(frozen=True, slots=True)
class TrainEnvironment:
    """An environment to train in, and how its rollouts are sampled.

    Attributes:
        pool: plays it.
        sampling: vLLM's parameters.
        temperature: of the sampler.
        truncation: `top_k`, `top_p` and `min_p` as a `Group` has them.
        seed: what sampling is seeded from; None is unseeded.
    """

    pool: EnvironmentPool
    sampling: dict[str, Any]
    temperature: float
    truncation: dict[str, Any]
    seed: int | None

    @classmethod
    def of(cls, pool: EnvironmentPool, config: OrchestratorConfig, index: int) -> "TrainEnvironment":
        """Describe environment `index` of `config`, which `pool` plays."""
        sampling = config.sampling_of(config.env[index])
        truncation = {"top_k": max(0, sampling.top_k), "top_p": sampling.top_p, "min_p": sampling.min_p}
        return cls(pool, sampling_parameters(sampling), sampling.temperature, truncation, sampling.seed)


class Dispatcher:
    """Starts groups within the bound and on servers that have room, and sees each to its end.

    Attributes:
        complete: finished groups by group_id, which wait to be shipped.
        filled: those of them that teach nothing, and are kept because nothing better came.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: Sequence[TrainEnvironment],
        policy: Policy,
        scheduler: DeadlineScheduler,
        ledger: Ledger,
        tally: Tally,
        on_end: Callable[[], None],
    ) -> None:
        """Put the parts together; `on_end` is called whenever a group has ended."""
        self.complete: dict[int, Group] = {}
        self.filled: set[int] = set()
        self._config = config
        self._environments = environments
        self._policy = policy
        self._scheduler = scheduler
        self._ledger = ledger
        self._tally = tally
        self._on_end = on_end
        self._drops = Drops(scheduler.batch_groups, config.oversampling_factor)
        self._lengths = LengthHistory()
        self._lookahead: Lookahead[Draw] = Lookahead(
            ledger.draw,
            lambda draw: self._lengths.expected(self._name(draw), draw.example),
            scheduler.batch_groups,
            length_aware=config.length_aware_admission and config.async_level > 0,
        )
        self._again: deque[Draw] = deque()
        self._failed = False

    def cut(self, step: int, base: dict[str, Any]) -> Cut:
        """Return the state once batches below `step` are shipped; `base` is the ledger's."""
        finished = [
            Finished(group, self._scheduler.version(group_id), self._scheduler.deadline(group_id))
            for group_id, group in self.complete.items()
        ]
        return Cut(step, base, finished, self._lengths.state())

    def restore(
        self,
        finished: Sequence[Finished],
        unfinished: Sequence[Draw],
        waiting: Sequence[Draw],
        lengths: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on where an earlier process ended.

        Args:
            finished: groups that wait to be shipped; they keep their deadlines.
            unfinished: positions that were dispatched; they are dispatched again before any other.
            waiting: positions that were drawn and not dispatched.
            lengths: what was known of the lengths of completions.
        """
        if lengths is not None:
            self._lengths.restore(lengths)
        for known in finished:
            self.complete[known.group.group_id] = known.group
            self._scheduler.restore(known.group.group_id, known.deadline, complete=True)
            self._tally.arrived(known.group)
        self._again.extend(unfinished)
        self._lookahead.restore(waiting)

    def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start groups as long as the bound and the servers have room."""
        if self._config.oversampling_factor > 1:
            self._scheduler.credit = self._drops.credit(self._scheduler.in_flight)
        while not self._failed and (server := self._server_for_one_more()) is not None:
            draw = self._again.popleft() if self._again else self._lookahead.next(self._scheduler.placed)
            version = server.version.step
            deadline = self._scheduler.admit(draw.group_id, version)
            self._ledger.issued(draw.group_id, version, deadline)
            server.in_flight += self._config.rollouts_per_example
            tasks.create_task(self._play(draw, server))

    def shipped(self, group_ids: Sequence[int]) -> None:
        """Start the next batch, after one with these groups."""
        self._drops.shipped()
        self.filled.difference_update(group_ids)

    def _server_for_one_more(self) -> Server | None:
        """Choose the least loaded server whose version the bound admits; None if one more group must wait."""
        count, limit = self._config.rollouts_per_example, self._config.max_concurrent
        if limit is not None and (self._scheduler.in_flight + 1) * count > max(limit, count):
            return None
        able = (server for server in self._policy.by_load(count) if self._scheduler.can_admit(server.version.step))
        return next(able, None)

    async def _play(self, draw: Draw, server: Server) -> None:
        """Play one group to its end. A server that is lost takes its rollouts with it: they start again elsewhere.

        So do those of one that fails to answer properly, a few times.
        """
        faults = 0
        try:
            for attempt in itertools.count():
                try:
                    async with server.life():
                        await self._sample(draw, server)
                    server.succeeded()
                    break
                except EngineError as error:
                    if not error.is_fault:
                        raise
                    self._failed_at(server)
                    faults += 1
                    if faults > _MOST_FAULTS:
                        self._drop(draw.group_id, ENGINE, str(error))
                        break
                    self._tally.retried += 1
                    logger.warning("group {} is played again: {}", draw.group_id, error)
                except EngineLost as error:
                    if attempt == _MOST_RETRIES:
                        raise
                    self._policy.suspect(server)
                    self._tally.retried += 1
                    logger.warning("group {} is played again: {}", draw.group_id, error)
                finally:
                    server.in_flight -= self._config.rollouts_per_example
                server = await self._policy.any_at(self._scheduler.version(draw.group_id))
                deadline = self._scheduler.repin(draw.group_id, server.version.step)
                self._ledger.issued(draw.group_id, server.version.step, deadline)
                server.in_flight += self._config.rollouts_per_example
        except BaseException:
            self._failed = True  # the task group ends: the loop may get one more turn, and must not add to it
            raise
        finally:
            self._on_end()

    def _failed_at(self, server: Server) -> None:
        """Leave a server alone for a while that has just failed, and look again for work when that is over."""
        asyncio.get_running_loop().call_later(server.failed(), self._on_end)

    async def _sample(self, draw: Draw, server: Server) -> None:
        env = self._environments[draw.env]
        seed = None if env.seed is None else (env.seed, draw.env, draw.group_id)
        try:
            rollouts = await env.pool.run_group(
                draw.example, self._config.rollouts_per_example, server.engine.url, env.sampling,
                self._config.seq_len, seed,
            )  # fmt: skip
        except EnvironmentFailed as error:
            self._drop(draw.group_id, f"error/{env.pool.name}", str(error))
        except SampleTooLong as error:
            self._drop(draw.group_id, OVERLONG, str(error))
        else:
            self._refuse_older(rollouts, self._scheduler.version(draw.group_id), server)
            await self._policy.acknowledged(server, _newest(rollouts))
            self._finish(
                Group(draw.group_id, tuple(rollouts), env.pool.name, draw.example, env.temperature, **env.truncation)
            )

    def _refuse_older(self, rollouts: Sequence[Rollout], version: int, server: Server) -> None:
        """Raise EngineLost where the server was started again unnoticed, and sampled from its base model."""
        oldest = min(int(s.versions[s.versions >= 0].min()) for rollout in rollouts for s in rollout.samples)
        if oldest < version:
            raise EngineLost(f"inference at {server.engine.url} sampled from version {oldest}, not {version}")

    def _finish(self, group: Group) -> None:
        """Keep a group that was played to its end, or drop it."""
        self._tally.arrived(group)
        self._lengths.add(group.env, group.example, float(group.lengths.max()))
        if is_overlong(group.rollouts, self._config.seq_len):
            self._drop(group.group_id, OVERLONG, "a sample does not fit into seq_len", group)
        elif is_off_difficulty(group.rewards, self._config.buffer):
            self._drop(group.group_id, DIFFICULTY, f"its mean reward is {group.rewards.mean():.3g}", group)
        elif self._config.filter_zero_advantage and self._teaches_nothing(group):
            self._drop(group.group_id, ZERO_ADVANTAGE, "all its advantages are 0", group, degenerate=True)
        else:
            self._drops.kept()
            self._keep(group)

    def _teaches_nothing(self, group: Group) -> bool:
        scores = self.scores(group)
        return degenerate(self._config.advantage, scores)

    def scores(self, group: Group) -> Scores:
        """Return what the advantage of a group is computed from: its rewards as shaping leaves them."""
        raw = Scores.of(group)
        shaped = shape_rewards(self._config.reward_shaping, raw, self._config.zero_truncated_completions)
        return Scores(shaped, raw.lengths, raw.inputs, raw.turns, raw.truncated)

    def _keep(self, group: Group) -> None:
        self.complete[group.group_id] = group
        self._scheduler.complete(group.group_id)
        self._ledger.done(group)

    def _drop(
        self, group_id: int, reason: str, failure: str, group: Group | None = None, degenerate: bool = False
    ) -> None:
        """Drop a group under `reason`, unless the batch is to be filled with such groups.

        Raises:
            RunError: too many were dropped in a row.
        """
        verdict = self._drops.judge(degenerate)
        if verdict is Verdict.FILL and group is not None:
            self.filled.add(group_id)
            self._keep(group)
            return
        level = "WARNING" if group is None else "DEBUG"
        logger.log(level, "group {} is dropped as {}: {}", group_id, reason, failure)
        self._scheduler.drop(group_id)
        self._ledger.dropped(group_id, reason, None if group is None else group.rewards)
        self._tally.discarded(reason, group)
        if verdict is Verdict.FAIL:
            raise RunError(f"{self._drops.row} groups in a row were dropped as {reason}; the last: {failure}")

    def _name(self, draw: Draw) -> str:
        return self._environments[draw.env].pool.name


def _newest(rollouts: Sequence[Rollout]) -> int:
    """Return the newest version that sampled a token of them."""
    return max(int(sample.versions.max()) for rollout in rollouts for sample in rollout.samples)
