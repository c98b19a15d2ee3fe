"""`rl --bench`: inference and the trainer, each by itself, one after the other."""

import asyncio
from dataclasses import replace

from rich.console import Console

from prime_rl.configs.rl import RLConfig
from prime_rl.monitor import bench
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.children import Role
from prime_rl.supervisor.events import Events
from prime_rl.supervisor.roles import make_roles
from prime_rl.supervisor.supervise import Outcome, supervise


def benchmark(config: RLConfig, paths: RunPaths, console: Console) -> Outcome:
    """Sample batches, then train on random ones of the same shape; print both tables.

    Not at the same time, as in a run: on a machine where both share the cores neither figure would say anything.
    """
    roles = {role.name: role for role in make_roles(config, paths)}
    trainer = roles.pop("trainer")
    for stage in ([replace(role, last=role.finishes) for role in roles.values()], [trainer]):
        outcome = _supervise(stage, console)
        if not outcome.ok:
            return outcome
    bench.report(paths, ["orchestrator", "trainer"], console)
    return outcome


def _supervise(roles: list[Role], console: Console) -> Outcome:
    events = Events(None, lambda line: console.print(line, markup=False, soft_wrap=True))
    return asyncio.run(supervise([replace(role, restarts=0) for role in roles], events=events))
