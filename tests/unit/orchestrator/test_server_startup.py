"""Servers for which a run waits before it dispatches groups."""

import asyncio
from types import SimpleNamespace

import pytest

from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.orchestrator.inference.server_startup import bring_up
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost, LoadedPolicy

OK = LoadedPolicy(PolicyVersion(0, 0), "base")


class FakeServer:
    """A server that returns the given answers in order, and repeats the last one."""

    def __init__(self, policy=(OK,), reset=(OK,)):
        self.up, self.version, self.loaded = False, None, None
        self.switch_lock, self._left = asyncio.Lock(), {"policy": list(policy), "reset": list(reset)}
        self.client = SimpleNamespace(
            url="http://server", policy=lambda: self._answer("policy"), reset=lambda: self._answer("reset")
        )

    async def _answer(self, request):
        left = self._left[request]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def policy(self):
        return await self.client.policy()

    async def wait_until_reachable(self, timeout_s):
        try:
            await self._answer("policy")
        except InferenceServerLost as error:
            raise RunError(f"waited {timeout_s} s: {error}") from None

    async def load(self, published):
        return LoadedPolicy(published, "h")


def join(servers, is_restart, timeout_s=5.0, published=None):
    minimum = 1 if is_restart else len(servers)
    asyncio.run(bring_up(servers, published, timeout_s, reconnect_s=1.0, minimum=minimum))


def test_bring_up_new_run_waits_for_all_servers():
    there, gone = FakeServer(), FakeServer(policy=[InferenceServerLost("gone")])
    with pytest.raises(RunError, match="waited 5"):
        join([there, gone], is_restart=False)


def test_bring_up_restart_needs_one_server():
    there, gone = FakeServer(), FakeServer(policy=[InferenceServerLost("gone")])
    join([gone, there], is_restart=True, published=PolicyVersion(1, 4))
    assert there.up and there.version == PolicyVersion(1, 4) and not gone.up


def test_bring_up_restart_waits_for_the_first_server():
    late = FakeServer(policy=[InferenceServerLost("not yet"), InferenceError("starting", 503), OK])
    join([late, FakeServer(policy=[InferenceServerLost("gone")])], is_restart=True)
    assert late.up


def test_bring_up_no_answer_in_time_raises():
    with pytest.raises(RunError, match=r"waited 0\.1 s: gone"):
        join([FakeServer(policy=[InferenceServerLost("gone")])], is_restart=True, timeout_s=0.1)


def test_bring_up_rejection_raises_without_waiting():
    with pytest.raises(InferenceError, match="no key"):
        join([FakeServer(policy=[InferenceError("no key", 401)])], is_restart=True)
    with pytest.raises(InferenceError, match="another run"):
        join([FakeServer(reset=[InferenceError("another run", 409)])], is_restart=False)


def test_bring_up_server_lost_during_setup_may_return():
    server = FakeServer(reset=[InferenceServerLost("died"), InferenceError("no memory", 500), OK])
    join([server], is_restart=False)
    assert server.up
    with pytest.raises(RunError, match="died; lost 10 times"):
        join([FakeServer(reset=[InferenceServerLost("died")])], is_restart=False)
