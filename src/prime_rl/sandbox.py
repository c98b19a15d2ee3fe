"""The modules of the package `prime_rl_sandbox` by their earlier names, such as `prime_rl.sandbox.execution`."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PREFIX = f"{__name__}."
__path__: list[str] = []  # so that this module may have submodules


class _EarlierNames(MetaPathFinder, Loader):
    """Imports `prime_rl.sandbox.NAME` as the module `prime_rl_sandbox.NAME` itself."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(_PREFIX) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"prime_rl_sandbox.{spec.name.removeprefix(_PREFIX)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__  # the import system has replaced it by that of the earlier name
        assert spec is not None
        module.__spec__ = spec.loader_state


sys.meta_path.insert(0, _EarlierNames())  # before the folder of a package such as jail is searched
