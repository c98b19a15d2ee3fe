"""Calls of one function in a sandbox: the program, and the value that it returned."""

import base64
import inspect
import json
from typing import Any

from prime_rl.sandbox import plain_values
from prime_rl.sandbox.execution import ExecutionRequest, ExecutionResult, TestCase

_RESULT_FILE = ".function_result"
_CALL = """
def _call_function():
    import base64, json, os, sys
    codec = {"__name__": "plain_values"}
    exec(base64.b64decode("__CODEC__"), codec)
    call = codec["decode_value"](json.loads(base64.b64decode("__CALL__")))
    value = globals()[call["function"]](*call["args"], **call["kwargs"])
    try:
        text = json.dumps(codec["encode_value"](value))
    except TypeError:
        text = json.dumps(codec["encode_value"](list(value)))
    with open(".function_result", "w") as file:
        file.write(text)
_call_function()
"""


def build_call(code: str, test: TestCase) -> ExecutionRequest:
    """Return the request that defines the code's functions and calls the one of the test."""
    call = {"function": test.function, "args": list(test.args), "kwargs": dict(test.kwargs)}
    encoded = base64.b64encode(json.dumps(plain_values.encode_value(call)).encode()).decode()
    codec = base64.b64encode(inspect.getsource(plain_values).encode()).decode()
    program = code + "\n" + _CALL.replace("__CODEC__", codec).replace("__CALL__", encoded)
    return ExecutionRequest(program, outputs=[_RESULT_FILE], module_name="solution")


def read_call_result(result: ExecutionResult) -> Any:
    """Return the value of the function.

    Raises:
        ValueError: it returned no plain value, or the program ended before the call.
    """
    if _RESULT_FILE not in result.files:
        raise ValueError("the function did not return")
    try:
        return plain_values.decode_value(json.loads(result.files[_RESULT_FILE]))
    except (TypeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"the function did not return a plain value: {error}") from None
