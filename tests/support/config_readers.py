"""Finds the configuration keys that code outside configs/ and loading/ reads, with mypy: class and field."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Instance, Type, TypeVarType, UnionType, get_proper_type

SOURCE = Path(__file__).parents[2] / "src"
ANY = "*"
"""Owner of a read by name, if its class is unknown."""
_CONFIGS = ("prime_rl.configs.", "prime_rl.loading.")
_BY_KEYWORD = "prime_rl.trainer.losses"
"""Functions that get all keys of their block as keyword arguments."""
_NOT_READERS = ("prepare", "without_effect", "without_effect_alone", "load")


@dataclass(frozen=True)
class Read:
    """`<instance of owner>.field` in a module."""

    owner: str
    field: str
    module: str
    line: int


class Readers:
    """Reads of configuration keys in a source tree."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.files = {_module(source, file): file for file in sorted((source / "prime_rl").rglob("*.py"))}
        self.trees = {module: ast.parse(file.read_text()) for module, file in self.files.items()}
        reads = _reads_by_mypy(source, self.files) | {read for module in self.files for read in self._by_name(module)}
        self._outside = {read for read in reads if not read.module.startswith(_CONFIGS)}
        attributes = {name for module in self.trees if not module.startswith(_CONFIGS) for name in self._names(module)}
        self._through = {read for read in reads - self._outside if self._function_of(read) in attributes}
        self._imports = {module: set(self._imported(module)) for module in self.files}

    @functools.cache  # noqa: B019  one instance per test module
    def reachable(self, start: str) -> set[str]:
        """Return the modules that `start` imports, directly or indirectly, or starts as processes."""
        found, left = set[str](), [start]
        while left:
            module = left.pop()
            if module not in found and module in self.files:
                found.add(module)
                left += self._imports[module]
        return found

    def has(self, owner: type, field: str, modules: set[str]) -> bool:
        """Return whether a module reads `field` of an instance of `owner`, directly or through a method."""
        names = {ANY, *(f"{base.__module__}.{base.__qualname__}" for base in owner.__mro__)}
        return any(
            read.field == field and read.owner in names and (read.module in modules or read in self._through)
            for read in self._outside | self._through
        )

    def _by_name(self, module: str) -> Iterator[Read]:
        """Yield reads by name: `getattr(config, "x")` and `config.model_dump(include={"x"})`."""
        for node in ast.walk(self.trees[module]):
            match node:
                case ast.FunctionDef(args=ast.arguments(kwonlyargs=names)) if module.startswith(_BY_KEYWORD):
                    yield from (Read(ANY, name.arg, module, node.lineno) for name in names)
                case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(str(name)), *_]):
                    yield Read(ANY, name, module, node.lineno)
                case ast.Call(func=ast.Attribute(attr="model_dump"), keywords=[ast.keyword("include", ast.Set(names))]):
                    for name in names:
                        if isinstance(name, ast.Constant):
                            yield Read(ANY, name.value, module, node.lineno)

    def _names(self, module: str) -> Iterator[str]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Attribute):
                yield node.attr

    def _function_of(self, read: Read) -> str | None:
        """Return the method of a configuration class that contains a read; None for a validator."""
        for node in self._functions(read.module):
            if node.lineno <= read.line <= (node.end_lineno or 0):
                checks = any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)
                return None if checks or node.name in _NOT_READERS else node.name
        return None

    @functools.cache  # noqa: B019
    def _functions(self, module: str) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.trees[module]) if isinstance(node, ast.FunctionDef)]

    def _imported(self, module: str) -> Iterator[str]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.split(":")[0]  # the name of a module that is started as a process


def _module(source: Path, file: Path) -> str:
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _reads_by_mypy(source: Path, files: dict[str, Path]) -> set[Read]:
    options = Options()
    options.incremental, options.cache_dir = False, "/dev/null"
    options.follow_imports, options.ignore_missing_imports = "skip", True  # other packages have none of our classes
    options.mypy_path = [str(source)]
    recorder = _Recorder(options)
    build.build([BuildSource(str(file), module) for module, file in files.items()], options, extra_plugins=[recorder])
    modules = {str(file): module for module, file in files.items()}
    return {Read(owner, field, modules[path], line) for owner, field, path, line in recorder.reads}


def _classes(given: Type) -> list[str]:
    """Return the configuration classes in a type."""
    given = get_proper_type(given)
    if isinstance(given, UnionType):
        return [name for item in given.items for name in _classes(item)]
    if isinstance(given, TypeVarType):
        return _classes(given.upper_bound)
    return [given.type.fullname] if isinstance(given, Instance) and given.type.fullname.startswith(_CONFIGS) else []


class _Recorder(Plugin):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.reads = set[tuple[str, str, str, int]]()

    def get_attribute_hook(self, fullname: str) -> Any:
        if not fullname.startswith(_CONFIGS):
            return None

        def record(context: AttributeContext) -> Any:
            declared, _, field = fullname.rpartition(".")
            for owner in _classes(context.type) or [declared]:
                self.reads.add((owner, field, context.api.path, context.context.line))
            return context.default_attr_type

        return record
