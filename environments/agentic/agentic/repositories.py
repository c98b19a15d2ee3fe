"""Small repositories with defects: templates of correct code, and edits that break it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from agentic.repository_templates import TEMPLATES

from .environment_tools.rows import Row, text_of

MAX_FILES = 40
MAX_FILE_CHARS = 50_000


@dataclass(frozen=True)
class HiddenTest:
    """A call whose value decides about the reward; it never enters the sandbox with the repository."""

    module: str
    function: str
    args: Sequence[Any]
    expected: Any


@dataclass(frozen=True)
class RepairTask:
    """A broken repository: what is wrong in words, files by name, and hidden tests."""

    question: str
    files: Mapping[str, str]
    tests: Sequence[HiddenTest]


def make_repairs(seed: int, part: str, count: int) -> Iterator[RepairTask]:
    """Yield repositories with one or two defects, the same for the same seed; all variants before any is repeated."""
    variants = [
        (template, defects)
        for template in TEMPLATES
        for number in (1, 2)
        for defects in combinations(template.defects, number)
    ]
    source = Random(f"agentic repair {part} {seed}")
    order: list[Any] = []
    for _ in range(count):
        if not order:
            order = source.sample(variants, len(variants))
        template, defects = order.pop()
        files = dict(template.files)
        for path, right, wrong in defects:
            files[path] = files[path].replace(right, wrong, 1)
        yield RepairTask(template.complaint, files, [HiddenTest(*test) for test in template.tests])


def read_repair(row: Row) -> RepairTask:
    """Return the task of a row: `question`, `files` (name -> text), `tests` ({module, function, args, expected}).

    Raises:
        ValueError: the row is malformed.
    """
    files, tests = row.get("files"), row.get("tests")
    if not isinstance(files, dict) or not files or not all(isinstance(text, str) for text in files.values()):
        raise ValueError("`files` must map names to text")
    for name, text in files.items():
        check_file(name, text)
    if not isinstance(tests, list) or not tests:
        raise ValueError("`tests` must be a list of {module, function, args, expected}")
    try:
        hidden = [HiddenTest(test["module"], test["function"], test["args"], test["expected"]) for test in tests]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a test needs module, function, args and expected: {error}") from None
    for test in hidden:
        if not all(part.isidentifier() for part in (*str(test.module).split("."), str(test.function))):
            raise ValueError(f"{test.module!r:.60} and {test.function!r:.60} must be names of Python")
    return RepairTask(text_of(row, "question"), files, hidden)


def check_file(name: str, text: str) -> None:
    """Raise a ValueError for a name that leads out of the repository, or for a text that is too long."""
    parts = name.split("/")
    if len(name) > 200 or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name[:80]!r} is not the name of a file in the repository")
    if len(text) > MAX_FILE_CHARS:
        raise ValueError(f"a file has at most {MAX_FILE_CHARS} characters, not {len(text)}")
