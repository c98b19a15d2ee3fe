"""Assert-style tests, run where the tested code cannot reach them.

The tests and the code run in two sandboxes. In that of the tests, each tested function is a stand-in that sends its
arguments as JSON through the host to the other one, and returns the plain value that comes back. The code under test
therefore cannot skip, patch or read the tests: `os._exit`, a patched `builtins`, an `__eq__` that returns True and a
printed end marker have no effect on them. The tests passed if their sandbox reports a random text after the last one.
"""

import asyncio
import inspect
import secrets
from collections.abc import Sequence

from prime_rl.sandbox import plain_values
from prime_rl.sandbox.execution import AssertResult, ExecutionResult, SandboxLimits, Verdict
from prime_rl.sandbox.jail.jail_pool import JailPool
from prime_rl.sandbox.session import Session

_PLAIN_VALUES = inspect.getsource(plain_values)

_SOLUTION_SIDE = """
import json as _json, sys as _sys
__name__ = "solution"
_sys.modules["solution"] = _sys.modules["__main__"]
_sys.set_int_max_str_digits(0) if hasattr(_sys, "set_int_max_str_digits") else None
_codec = {"__name__": "plain_values"}
exec(__CODEC__, _codec)
def _serve(_host_call=host_call, _codec=_codec, _namespace=globals()):
    reply = {"ready": True}
    while True:
        request = _json.loads(_host_call(_json.dumps(reply)))
        try:
            args, kwargs = _codec["decode_value"](request["args"]), _codec["decode_value"](request["kwargs"])
            value = _namespace[request["function"]](*args, **kwargs)
            value = list(value) if hasattr(value, "__next__") or isinstance(value, range) else value
            reply = {"value": _codec["encode_value"](value), "args": _codec["encode_value"](args)}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)[:1000]}
"""

_TEST_SIDE = """
import builtins as _builtins, json as _json, sys as _sys
_sys.set_int_max_str_digits(0) if hasattr(_sys, "set_int_max_str_digits") else None
_codec = {"__name__": "plain_values"}
exec(__CODEC__, _codec)
def _stand_in(name, host_call=host_call, encode=_codec["encode_value"], decode=_codec["decode_value"]):
    def call(*args, **kwargs):
        request = {"function": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        reply = _json.loads(host_call(_json.dumps(request)))
        if "error" in reply:
            kind = getattr(_builtins, str(reply["error"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if issubclass(kind, UnicodeError):  # it has other arguments
                kind = ValueError
            raise kind(f"{reply['error']}: {reply.get('message', '')}")
        for mine, theirs in zip(args, decode(reply["args"])):
            if isinstance(mine, list) and isinstance(theirs, list) and mine != theirs:
                mine[:] = theirs
            elif isinstance(mine, (dict, set)) and type(mine) is type(theirs) and mine != theirs:
                mine.clear()
                mine.update(theirs)
        return decode(reply["value"])
    call.__name__ = name
    return call
"""


_ENDED = '{"error": "RuntimeError", "message": "the tested code has ended"}'


class _SolutionSide:
    """Runs the tested code, and answers calls of the tests from it."""

    def __init__(self, code: str, seconds: float) -> None:
        self.code, self.seconds = code, seconds
        self.ready = asyncio.Event()
        self.result: ExecutionResult | None = None
        self._requests: asyncio.Queue[str] = asyncio.Queue()
        self._replies: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, reply: str) -> str:
        """Take a reply of the tested code, and return the next request for it."""
        if self.ready.is_set():
            self._replies.put_nowait(reply)
        self.ready.set()
        return await self._requests.get()

    async def call(self, request: str) -> str:
        """Return the reply of the tested code to a call of the tests."""
        if self.result is not None:
            return _ENDED
        self._requests.put_nowait(request)
        return await self._replies.get()

    async def run(self, session: Session) -> None:
        """Run until the session ends or the task is cancelled."""
        loaded = await session.run(_SOLUTION_SIDE.replace("__CODEC__", repr(_PLAIN_VALUES)), timeout=self.seconds)
        if loaded.ok:
            served = await session.run(self.code + "\n\n_serve()\n", timeout=self.seconds)
            self.result = served
        else:
            self.result = loaded
        self.ready.set()
        self._replies.put_nowait(_ENDED)


async def run_asserts(
    pool: JailPool,
    limits: SandboxLimits,
    code: str,
    tests: str,
    functions: Sequence[str],
    *,
    setup: str = "",
    timeout: float,
) -> AssertResult:
    """Run tests against functions of the code; arguments as in `Sandbox.run_asserts`."""
    solution = _SolutionSide(code, timeout)
    nonce = secrets.token_hex(16)
    stand_ins = "\n".join(f"{name} = _stand_in({name!r})" for name in functions)
    test_side = _TEST_SIDE.replace("__CODEC__", repr(_PLAIN_VALUES))
    program = f"{setup}\n{test_side}\n{stand_ins}\n{tests}\n{nonce!r}\n"
    async with (
        pool.pair_slots,
        Session(pool, limits, solution.answer) as code_session,
        Session(pool, limits, solution.call) as session,
    ):
        task = asyncio.create_task(solution.run(code_session))
        try:
            await solution.ready.wait()
            if solution.result is not None:
                return _failure(solution.result)
            tested = await session.run(program, timeout=timeout)
            if tested.ok and tested.value == repr(nonce):
                return AssertResult(True, Verdict.OK, latency_ms=tested.milliseconds)
            if solution.result is not None and not solution.result.ok:
                return _failure(solution.result)
            return _failure(tested)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _failure(result: ExecutionResult) -> AssertResult:
    verdict = Verdict.ERROR if result.verdict is Verdict.OK else result.verdict
    lines = result.stderr.strip().splitlines()
    return AssertResult(False, verdict, lines[-1] if lines else f"ended with {verdict}", result.milliseconds)
