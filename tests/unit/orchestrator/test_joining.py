"""Which servers a run waits for before it dispatches anything."""

import asyncio
from types import SimpleNamespace

import pytest

from prime_rl.errors import RunError
from prime_rl.orchestrator.engine import EngineError, EngineLost, LoadedPolicy
from prime_rl.orchestrator.joining import bring_up
from prime_rl.types import PolicyVersion

OK = LoadedPolicy(PolicyVersion(0, 0), "base")


class FakeServer:
    """A server whose engine answers each request with what it is told to; the last goes on for ever."""

    def __init__(self, policy=(OK,), reset=(OK,)):
        self.up, self.version, self.loaded = False, None, None
        self.steering, self._left = asyncio.Lock(), {"policy": list(policy), "reset": list(reset)}
        self.engine = SimpleNamespace(
            url="http://server", policy=lambda: self._answer("policy"), reset=lambda: self._answer("reset")
        )

    async def _answer(self, request):
        left = self._left[request]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def until_reachable(self, timeout_s):
        try:
            await self._answer("policy")
        except EngineLost as error:
            raise RunError(f"waited {timeout_s} s: {error}") from None

    async def load(self, published):
        return LoadedPolicy(published, "h")


def join(servers, goes_on, timeout_s=5.0, published=None):
    asyncio.run(bring_up(servers, published, timeout_s, reconnect_s=1.0, goes_on=goes_on))


def test_a_run_that_begins_waits_for_all():
    there, gone = FakeServer(), FakeServer(policy=[EngineLost("gone")])
    with pytest.raises(RunError, match="waited 5"):
        join([there, gone], goes_on=False)


def test_a_run_that_goes_on_needs_one_and_leaves_the_others_to_come_back():
    there, gone = FakeServer(), FakeServer(policy=[EngineLost("gone")])
    join([gone, there], goes_on=True, published=PolicyVersion(1, 4))
    assert there.up and there.version == PolicyVersion(1, 4) and not gone.up


def test_where_none_answers_yet_the_first_is_waited_for():
    late = FakeServer(policy=[EngineLost("not yet"), EngineError("starting", 503), OK])
    join([late, FakeServer(policy=[EngineLost("gone")])], goes_on=True)
    assert late.up


def test_where_none_answers_in_time_the_error_says_so():
    with pytest.raises(RunError, match=r"waited 0\.1 s: gone"):
        join([FakeServer(policy=[EngineLost("gone")])], goes_on=True, timeout_s=0.1)


def test_a_refusal_is_not_waited_out():
    with pytest.raises(EngineError, match="no key"):
        join([FakeServer(policy=[EngineError("no key", 401)])], goes_on=True)
    with pytest.raises(EngineError, match="another run"):
        join([FakeServer(reset=[EngineError("another run", 409)])], goes_on=False)


def test_one_that_dies_while_it_is_set_up_may_come_back():
    server = FakeServer(reset=[EngineLost("died"), EngineError("no memory", 500), OK])
    join([server], goes_on=False)
    assert server.up
    with pytest.raises(RunError, match="died; so it went 10 times"):
        join([FakeServer(reset=[EngineLost("died")])], goes_on=False)
