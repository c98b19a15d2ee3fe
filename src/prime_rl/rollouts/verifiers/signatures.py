"""The parameters of functions of an environment, read once per function.

Verifiers calls reward functions, stop conditions and cleanup handlers with the objects that their parameters name.
"""

import dis
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(frozen=True, slots=True)
class CallParameters:
    """How a function is called with objects by name.

    Attributes:
        signature: of the function.
        names: of its parameters.
        takes_all: it has `**kwargs`.
        is_coroutine: it is a coroutine function.
        may_suspend: running it may have to wait for the event loop: any coroutine function with an `await`, and
            callable objects, which are not examined.
    """

    signature: inspect.Signature
    names: frozenset[str]
    takes_all: bool
    is_coroutine: bool
    may_suspend: bool

    def select(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the objects that the function takes."""
        if self.takes_all:
            return objects
        return {name: objects[name] for name in self.names if name in objects}


# Weak: an environment may define functions for each rollout. The methods of an object are made at each access, so they
# are stored by their function, apart from plain functions because their signature has one parameter less.
_of_functions: WeakKeyDictionary[Any, CallParameters] = WeakKeyDictionary()
_of_methods: WeakKeyDictionary[Any, CallParameters] = WeakKeyDictionary()


def call_parameters(func: Callable[..., Any]) -> CallParameters:
    """Return the parameters of `func`, from a cache for functions, methods and partial functions."""
    cache, key = _of_functions, func
    if isinstance(func, types.MethodType):
        cache, key = _of_methods, func.__func__
    if not isinstance(key, types.FunctionType | partial):
        return _read(func)
    if (known := cache.get(key)) is None:
        known = cache[key] = _read(func)
    return known


def signature(func: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `func`, as `inspect.signature` does."""
    return call_parameters(func).signature


def _read(func: Callable[..., Any]) -> CallParameters:
    found = inspect.signature(func)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.parameters.values())
    is_coroutine = inspect.iscoroutinefunction(func)
    return CallParameters(found, frozenset(found.parameters), takes_all, is_coroutine, _may_suspend(func, is_coroutine))


def _may_suspend(func: Any, is_coroutine: bool) -> bool:
    code = getattr(getattr(func, "__func__", func), "__code__", None)
    if not isinstance(code, types.CodeType):
        return True
    return is_coroutine and any(instruction.opname == "YIELD_VALUE" for instruction in dis.get_instructions(code))
