"""Every Python block of the documentation runs.

Here are the fragments. Programs run in tests/integration/api/test_documented_programs.py, the recipes of
docs/extending.md in tests/unit/test_extending.py, the W&B loop of docs/monitoring.md in
tests/unit/test_plots.py.
"""

import ast
import inspect
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.isolation import needs_isolation
from tests.unit.test_docs import PAGES, ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"README.md", "docs/python_api.md", "docs/extending.md", "docs/monitoring.md", "docs/tinker.md"}


@dataclass
class Fragment:
    """How to run a block.

    Attributes:
        page: its page.
        mark: text that only this block of the page has.
        check: gets the names that the block has defined.
        names: makes the names that the block uses, in the folder in which it runs.
        marks: of pytest.
    """

    page: str
    mark: str
    check: Callable[[dict[str, Any]], bool]
    names: Callable[[Path], dict[str, Any]] = field(default=lambda folder: {})
    marks: tuple[pytest.MarkDecorator, ...] = ()


def dataset_and_rubric(folder):
    import verifiers as vf
    from datasets import Dataset

    rows = [{"question": "1 + 1?", "answer": "2"}]
    return {"make_dataset": lambda: Dataset.from_list(rows), "make_rubric": vf.Rubric}


def two_versions(folder):
    """Versions 8 and 9 of a small tensor, and a buffer with the former."""
    import numpy as np
    from safetensors.numpy import save_file

    from prime_rl.storage.tensor_hashes import map_tensors

    for step in (8, 9):
        (folder / f"weights/step_{step}").mkdir(parents=True)
        save_file({"w": np.full(64, step, np.float32)}, folder / f"weights/step_{step}/model.safetensors")
    (folder / "buffers").mkdir()
    shutil.copy(folder / "weights/step_8/model.safetensors", folder / "buffers")
    buffers = map_tensors(folder / "buffers")
    writable = {name: type(raw)(raw.dtype, raw.shape, raw.data.copy()) for name, raw in buffers.items()}
    return {"buffers": writable}


FRAGMENTS = [  # those of docs/agents.md also run in tests/unit/rollouts/test_agent_function.py and test_gateway.py
    Fragment("docs/agents.md", "async def solve", lambda names: callable(names["solve"])),
    Fragment("docs/agents.md", "def run_one", lambda names: callable(names["run_one"])),
    Fragment(
        "docs/environments.md",
        "def load_environment",
        lambda names: names["load_environment"](3).get_dataset()[2]["answer"] == "4",
    ),
    Fragment("docs/environments.md", "def is_short", lambda names: names["is_short"]("abc", 3) == 1.0),
    Fragment(
        "docs/sandbox.md",
        "async with Sandbox",
        lambda names: names["result"].stdout == "cba\n" and all(one.passed for one in names["results"]),
        lambda folder: {"code": "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(5)"},
        (needs_isolation,),
    ),
    Fragment(
        "docs/sandbox.md",
        "PythonEnv",
        lambda names: type(names["load_environment"]()).__name__ == "PythonEnv",
        dataset_and_rubric,
        (needs_isolation,),
    ),
    Fragment(
        "packages/sandbox/README.md",
        "async with Sandbox",
        lambda names: names["result"].stdout == "cba\n" and names["results"][0].passed,
        marks=(needs_isolation,),
    ),
    Fragment(
        "docs/design/deltas.md",
        "encode_delta",
        lambda names: (names["buffers"]["w"].data == names["new"]["w"].data).all(),
        two_versions,
    ),
]


def blocks_of(page):
    """The Python blocks of a page."""
    return BLOCK.findall(page.read_text())


def test_every_block_has_a_test():
    found = {str(page.relative_to(ROOT)): len(blocks_of(page)) for page in PAGES}
    known = [fragment.page for fragment in FRAGMENTS]
    untested = {page for page, count in found.items() if page not in ELSEWHERE and count != known.count(page)}
    assert not untested, f"add their Python blocks to FRAGMENTS: {untested}"


@pytest.mark.parametrize(
    "fragment", [pytest.param(one, id=f"{one.page}:{one.mark}", marks=one.marks) for one in FRAGMENTS]
)
async def test_fragment_runs(fragment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks_of(ROOT / fragment.page) if fragment.mark in block]
    names = {"__name__": "fragment", **fragment.names(tmp_path)}
    code = compile(block, fragment.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.isawaitable(result):
        await result
    assert fragment.check(names)
