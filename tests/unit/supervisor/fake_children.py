"""A run over children without processes, which a test ends."""

import asyncio
from dataclasses import replace

from prime_rl.supervisor import supervisor as module
from prime_rl.supervisor.child_processes import ChildProcess, ProcessSpec
from prime_rl.supervisor.lifecycle_events import EventLog
from prime_rl.supervisor.process_tree import ProcessTree
from prime_rl.supervisor.supervisor import SupervisorTimeouts

ROLES = {"inference": {"must_finish": False}, "orchestrator": {}, "trainer": {"is_last": True}}
RUNS = {
    "inference": {"must_finish": False}, "run_a": {"fails_alone": True}, "run_b": {"fails_alone": True},
    "trainer": {"is_last": True},
}  # fmt: skip


class FakeChild(ChildProcess):
    """A child without a process."""

    def __init__(self, spec, pid):
        self.spec, self.pid, self.exited = spec, pid, asyncio.get_running_loop().create_future()

    def end(self, code):
        self.exited.set_result(code)


class Scene:
    """A supervised run of `roles`, with more fields of the process specs by role."""

    def __init__(self, monkeypatch, tmp_path, roles=ROLES, max_restarts=1, **fields):
        self.children, self.printed = [], []
        self.roles = [
            replace(
                ProcessSpec(name, ["x"], {}, tmp_path / f"{name}.log", tmp_path / f"{name}.error"),
                max_restarts=max_restarts,
                **(own | fields.get(name, {})),
            )
            for name, own in roles.items()
        ]
        monkeypatch.setattr(module.ChildProcess, "start", self._start)
        monkeypatch.setattr(ProcessTree, "leftovers", lambda self, role, roles: [])
        stopped = asyncio.get_running_loop().create_future()
        timeouts = SupervisorTimeouts(exit_seconds=2, startup_seconds=0, culprit_seconds=1)
        self.run = module._Supervision(self.roles, timeouts, EventLog(None, self.printed.append), None, stopped)
        self.outcome = asyncio.ensure_future(self.run.until_over())

    def _start(self, spec, reason=None):
        self.children.append(FakeChild(spec, 2**22 + len(self.children)))
        return self.children[-1]

    async def started(self, name, times=1):
        async with asyncio.timeout(60):
            while len(found := [child for child in self.children if child.spec.name == name]) < times:
                await asyncio.sleep(0.1)
        return found[-1]
