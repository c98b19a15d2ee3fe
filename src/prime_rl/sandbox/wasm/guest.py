"""The program inside of WebAssembly: runs Python code and session cells for `wasm_child`.

`component` compiles it with a CPython of the same tool. What is imported and read here at the top is part of the
compiled file: at run time, the interpreter sees no files but its working directory.
"""

import importlib.abc
import importlib.util
import json
import os
import random
import sys
import zlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import jail_program
import wit_world

_HOME = "/tmp"
_LIBRARY = Path(json.__file__).parents[1]
_LEFT_OUT = ("test", "idlelib", "tkinter", "ensurepip", "lib2to3", "pydoc_data", "turtledemo", "site-packages")
_PRELOAD = (
    "asyncio", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "io", "itertools", "math", "operator", "re", "statistics", "string", "tempfile", "time", "typing",
)  # fmt: skip


def _read_library() -> dict[str, bytes]:
    """Return the compressed sources of the standard library by path, such as `json/decoder.py`."""
    paths = [path.relative_to(_LIBRARY) for path in _LIBRARY.rglob("*.py")]
    return {
        str(path): zlib.compress((_LIBRARY / path).read_bytes()) for path in paths if path.parts[0] not in _LEFT_OUT
    }


class _LibraryFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports modules of the standard library from the sources in memory."""

    def __init__(self, sources: dict[str, bytes]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._find(fullname) not in self._sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        return self._find(fullname).endswith("/__init__.py")

    def get_source(self, fullname: str) -> str:
        return zlib.decompress(self._sources[self._find(fullname)]).decode()

    def _find(self, fullname: str) -> str:
        name = fullname.replace(".", "/")
        return f"{name}/__init__.py" if f"{name}/__init__.py" in self._sources else f"{name}.py"


for _name in _PRELOAD:
    importlib.import_module(_name)
sys.meta_path.append(_LibraryFinder(_read_library()))
_cells = ModuleType("__main__")
_num_cells = 0


class WitWorld(wit_world.WitWorld):
    """What the component exports."""

    def execute(self, command: str) -> str:
        """Run a command and return its report, both as JSON."""
        return json.dumps(_execute(json.loads(command)))


def _execute(command: dict[str, Any]) -> dict[str, Any]:
    global _num_cells
    if command["kind"] == "cell":
        _num_cells += 1
        return jail_program.run_cell(command["code"], _cells.__dict__, f"<cell {_num_cells}>")
    _start()
    if command["kind"] == "code":
        return {"exit_code": jail_program.run_program(command["code"], command["module_name"])}
    sys.modules["__main__"] = _cells
    if command["calls"]:
        _cells.__dict__["host_call"] = _call_host
    return {}


def _start() -> None:
    """Replace what the compiled file has kept of the machine that compiled it."""
    os.environ.clear()
    os.environ.update({"HOME": _HOME, "TMPDIR": _HOME, "LANG": "C.UTF-8"})
    os.chdir(_HOME)
    sys.path[:] = [_HOME]
    sys.path_importer_cache.clear()
    random.seed()
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _call_host(text: str) -> str:
    """Send a text to the host and return its answer."""
    return str(wit_world.call_host(text))
