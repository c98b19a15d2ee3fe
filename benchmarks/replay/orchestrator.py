"""The real orchestrator on a trace, with its own scheduler or with another policy.

    python -m replay.orchestrator RUN_DIRECTORY URL TOKENIZER

Prints `ready` when environments and server are connected, starts at the next line of its input, and prints the CPU
seconds of its process and workers.
"""

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import uvloop
from policies import Baseline
from simulation import BASELINES

from prime_rl.configs.client import ClientConfig
from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig, OrchestratorModelConfig
from prime_rl.configs.sampling import SamplingConfig
from prime_rl.liveness.parent_process import die_with_parent
from prime_rl.monitors import Monitor
from prime_rl.orchestrator import orchestrator
from prime_rl.orchestrator.orchestrator_setup import connect, model_access, start_environments
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl.storage.paths import RunPaths
from replay.spec import Spec, replayed_tokens

STALE = "stale"
"""Reason of a group that a policy throws away to keep its bound."""

_ROOM = 2
"""Rollouts in flight, in slots, of the policies that start groups as long as slots are free."""

_LOOKS = 40
"""Looks at the server's /metrics in t_infer: as the default of one a second does where a step takes 40 seconds."""

_UNBOUNDED = 1000
_PROMPT_TOKENS = 64


class Substitute:
    """Another policy with the interface of `DeadlineScheduler`."""

    def __init__(self, policy: Baseline, steps: int) -> None:
        self._policy, self._steps = policy, steps
        self._orchestrator: Any = None
        self._thrown_away = 0

    def __getattr__(self, name: str) -> Any:
        """Forward to the policy."""
        return getattr(self._policy, name)

    def serve(self, orchestrator: Any) -> None:
        """Report groups that the policy discards to `orchestrator`."""
        self._orchestrator = orchestrator

    @property
    def in_flight(self) -> int:
        """Groups that were admitted and are not complete."""
        return len(self._policy.started) - len(self._policy.completed)

    @property
    def finished(self) -> bool:
        """Whether every batch was shipped."""
        return self._policy.next_step >= self._steps

    def version(self, group_id: int) -> int:
        """Return the version at which the group started."""
        return self._policy.started[group_id]

    def can_admit(self, version: int) -> bool:
        """Return whether a group may start and a batch is left for it."""
        return not self.finished and self._policy.can_admit(version)

    def ready(self) -> list[int] | None:
        """Choose the next batch, and discard groups that are too old for the policy."""
        self._policy.version = self._orchestrator._inference.version
        batch = None if self.finished else self._policy.ready()
        for group_id in self._policy.discarded[self._thrown_away :]:
            group = self._orchestrator._dispatcher.complete.pop(group_id)
            self._orchestrator._ledger.dropped(group_id, STALE, group.rewards)
            self._orchestrator._counters.discarded(STALE, group)
        self._thrown_away = len(self._policy.discarded)
        return batch


def configuration(spec: Spec, url: str, tokenizer: str) -> OrchestratorConfig:
    policy, work = spec.policy, spec.workload
    bound = _UNBOUNDED if policy.bound is None else policy.bound
    starts_always = policy.name in ("discard_stale", "ship_hold")
    return OrchestratorConfig(
        model=OrchestratorModelConfig(name=tokenizer),
        client=ClientConfig(base_url=[url]),
        env=[EnvConfig(id="trace_environment", name=spec.trace.ENVIRONMENT, args={"examples": work.examples})],
        batch_size=work.batch_groups * work.group_size,
        rollouts_per_example=work.group_size,
        seq_len=_PROMPT_TOKENS + replayed_tokens(work.max_tokens),
        sampling=SamplingConfig(seed=spec.seed, max_tokens=replayed_tokens(work.max_tokens)),
        async_level=policy.k,
        max_off_policy_steps=bound,
        length_aware_admission=policy.batches if policy.expectation is not None else 0,
        max_concurrent=_ROOM * work.slots if starts_always else None,
        concurrency=ConcurrencyConfig(interval_seconds=work.t_infer / _LOOKS),
        max_steps=work.steps,
        seed=spec.seed,
        output_dir=spec.root,
        run_id=spec.root.name,
        wait_timeout_seconds=120,
    )


async def run(spec: Spec, url: str, tokenizer: str) -> None:
    config, paths = configuration(spec, url, tokenizer), RunPaths(spec.root)
    substitute = None
    if spec.policy.name in BASELINES:
        policy = BASELINES[spec.policy.name](spec.workload.batch_groups, spec.policy.k)
        assert isinstance(policy, Baseline)
        substitute = Substitute(policy, spec.workload.steps)
        orchestrator.DeadlineScheduler = lambda *_, **__: substitute  # type: ignore[assignment,misc]
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(WorkerLauncher())
        environments = await start_environments(config, host, model_access(config), stack)
        servers = [await connect(config, url, stack)]
        monitor = Monitor(paths, "orchestrator", None)
        stack.callback(monitor.close)
        ours = orchestrator.OrchestratorLoop(config, environments, servers, monitor)
        if substitute is not None:
            substitute.serve(ours)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        before = cpu_seconds()
        await ours.run()
        print(cpu_seconds() - before, flush=True)


def cpu_seconds() -> float:
    """Return the processor time of this process and its workers so far."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(spent.user + spent.system for spent in times)


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(run(Spec.read(Path(sys.argv[1])), *sys.argv[2:]))
