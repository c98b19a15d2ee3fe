"""vLLM in unit tests: a test imports it, and not its module, because the import costs seven CPU seconds per worker."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
"""Skips a test on a machine without vLLM."""


class LazyModule:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for such names while it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
