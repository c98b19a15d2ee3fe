"""Runs Python code like `python solution.py`, or as a cell of a session.

Used by `jail_child` and, compiled to WebAssembly, by `wasm/guest.py`. Standard library only, on any CPython from 3.9.
"""

import ast
import atexit
import linecache
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

_EXIT_ERROR = 1
_MAX_VALUE_CHARACTERS = 100_000


def run_program(code: str, module_name: str) -> int:
    """Run the code like `python solution.py`, and return its exit code."""
    module = ModuleType(module_name)
    sys.modules[module_name] = module
    sys.argv = ["solution.py"]
    status: object = 0
    try:
        linecache.cache["solution.py"] = (len(code), None, code.splitlines(keepends=True), "solution.py")
        exec(compile(code, "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        status = end.code
    except BaseException as error:  # as the interpreter does: print it, exit with 1
        status = _EXIT_ERROR
        _print_error(error)
    try:
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # a hook of the program, or a stream that it has replaced
        pass
    return status & 0xFF if isinstance(status, int) else int(status is not None)


def _print_error(error: BaseException) -> None:
    """Print a traceback without the frames of this file. A program may have replaced what this needs."""
    try:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())


def run_cell(code: str, namespace: dict[str, Any], name: str) -> dict[str, Any]:
    """Run a cell; its value is the `repr` of its last line, if that is an expression."""
    report: dict[str, Any] = {"failed": False, "value": None}
    try:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                report["value"] = repr(value)[:_MAX_VALUE_CHARACTERS]
    except BaseException as error:  # the session continues after any error, SystemExit included
        report["failed"], report["memory"] = True, isinstance(error, MemoryError)
        _print_error(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the cell may have replaced them
        report["failed"] = True
    return report
