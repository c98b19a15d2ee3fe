"""Groups start as soon as rate limits, pauses of environments and back-offs allow it, however timers fire."""

import asyncio
import itertools
import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.group_filter import DropPolicy, StartLimits
from prime_rl.orchestrator.inference.inference_server import InferenceServer
from prime_rl.orchestrator.orchestrator import OrchestratorLoop
from tests.support.virtual_clock import VirtualLoop

GROUPS = 60
LATE_SECONDS = 0.5


class UnevenLoop(VirtualLoop):
    """Timers fire up to 2 ms early, as those of uvloop do, or late, and so in another order."""

    def __init__(self, rng):
        super().__init__()
        self._rng = rng

    def call_at(self, when, *args, **kwargs):
        shift = self._rng.choice([-0.002, -0.001, -1e-7, 0.0, self._rng.uniform(0, LATE_SECONDS)])
        return super().call_at(max(self.time(), when + shift), *args, **kwargs)


class Starts(Dispatcher):
    """The conditions of the real dispatcher, for groups that only take time; some fail, some fault the server."""

    def __init__(self, config, rng, on_end):
        self._pools = [SimpleNamespace(name=env.name) for env in config.env]
        self._limits, self._drops = StartLimits(config), DropPolicy(2, environments=len(config.env))
        server = SimpleNamespace(_faults=0, backoff_until=0.0, client=SimpleNamespace(url="http://server"))
        self._inference = SimpleNamespace(servers=[server])
        self._rng, self._on_end, self.started = rng, on_end, []

    def admit(self, tasks):
        before = len(self.started)
        while len(self.started) < GROUPS and time.monotonic() >= self._inference.servers[0].backoff_until:
            env = next(filter(self._may_start, range(len(self._pools))), None)
            if env is None:
                break
            self._drops.health[env].started(len(self.started))
            self._limits.started(env)
            tasks.create_task(self._play(env, len(self.started)))
            self.started.append(time.monotonic())
        return len(self.started) - before

    async def _play(self, env, group_id):
        await asyncio.sleep(self._rng.choice([0.0, 0.1, 3.0]))
        server = self._inference.servers[0]
        if self._rng.random() < 0.2:
            InferenceServer.failed(server)
        else:
            InferenceServer.succeeded(server)
        if self._rng.random() < 0.3:
            self._drops.record_error(group_id, env)
        else:
            self._drops.record_kept(env)
        self._limits.ended(env)
        self._on_end()


async def start_all(config, rng):
    """Let `_keep_admitting` start all groups; return the times of their starts."""
    changed, stop = asyncio.Event(), asyncio.Event()
    starts = Starts(config, rng, changed.set)
    loop = SimpleNamespace(_can_dispatch=changed, _wake=asyncio.Event(), _dispatcher=starts, _num_ended=0)
    async with asyncio.TaskGroup() as tasks:
        admitting = tasks.create_task(OrchestratorLoop._keep_admitting(loop, tasks, stop))
        while len(starts.started) < GROUPS:
            await asyncio.sleep(1)
            silence = time.monotonic() - max([1000.0, *starts.started])
            assert silence < 120, f"only {len(starts.started)} groups have started"
        stop.set()
        changed.set()
        await admitting
    return starts.started


RATES = st.sampled_from([None, 37.0, 600.0, 12_000.0])


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.tuples(RATES, st.sampled_from([None, 2, 4])), min_size=1, max_size=3))
def test_every_group_that_may_start_does(seed, limits):
    rng = random.Random(seed)
    env = [
        EnvConfig(id="reverse_text", name=f"e{i}", max_rollouts_per_minute=rate, max_concurrent=concurrent)
        for i, (rate, concurrent) in enumerate(limits)
    ]
    config = OrchestratorConfig(env=env, batch_size=4, rollouts_per_example=2)
    with asyncio.Runner(loop_factory=lambda: UnevenLoop(rng)) as runner:
        runner.run(start_all(config, rng))


def test_rate_limit_spaces_starts_and_wastes_no_time():
    env = [EnvConfig(id="reverse_text", name="limited", max_rollouts_per_minute=600.0)]
    config, rng = OrchestratorConfig(env=env, batch_size=4, rollouts_per_example=2), random.Random(1)
    rng.random = lambda: 1.0  # nothing fails
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        started = runner.run(start_all(config, rng))
    gaps = [later - earlier for earlier, later in itertools.pairwise(started)]
    assert gaps == pytest.approx([0.2] * (GROUPS - 1))
