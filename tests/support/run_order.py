"""Which tests run, and on which worker: a file stays together, so does a folder whose files share a server."""

import gc
import json
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from loguru import logger
from xdist.scheduler import LoadScopeScheduling

from prime_rl.inference.vllm.libnuma import provide_libnuma

SHARED = ("tests/integration/inference/", "tests/integration/rl/shared_server/")
IMPORT_VLLM = ("tests/unit/trainer/test_rope.py",)  # as tests/unit/inference does
CLONE = Path(__file__).with_name("seconds.json")
_EXTENDED_FILE = re.compile(r"^pytestmark = .*\bextended\b", re.MULTILINE)
RECORDED = "tests/seconds"  # in pytest's cache: scope -> seconds of its last run

os.environ["PRIME_RL_STRICT_METRICS"] = "1"  # an undeclared metric is an error, also in processes that tests start

# Set before torch is imported, here and in processes that tests start: with more threads than cores, threads that spin
# for each other make a test fifty times slower.
os.environ["OMP_NUM_THREADS"] = "1"

# A shared machine is slow at times; the time-out of pytest ends an example that hangs.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


class ByImports(LoadScopeScheduling):
    """Gives each worker its own folders, because the imports of a folder take up to fifteen seconds in each worker.

    A worker continues in a folder in which it has run tests, then in one that no worker has run, then anywhere.
    Within these, the scope that took longest in earlier runs comes first, so that all workers end at about the same
    time. A fresh clone begins with the record in `seconds.json`, a copy of such a cache without short scopes.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._visited = defaultdict[Any, set[str]](set)  # folders by worker
        self._cache, self._measured = getattr(config, "cache", None), defaultdict[str, float](float)
        self._recorded: dict[str, float] = json.loads(CLONE.read_text()) if CLONE.exists() else {}
        self._recorded |= self._cache.get(RECORDED, {}) if self._cache is not None else {}
        config.add_cleanup(self._record)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self._measured[self._split_scope(self.registered_collections[node][item_index])] += duration
        super().mark_test_complete(node, item_index, duration)

    def _record(self) -> None:
        if self._cache is not None:  # not with `-p no:cacheprovider`
            self._cache.set(RECORDED, self._recorded | self._measured)

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARED if nodeid.startswith(folder)), nodeid.split("::", 1)[0])

    def _assign_work_unit(self, node: Any) -> None:
        mine, all_visited = self._visited[node], set[str]().union(*self._visited.values())

        def preference(scope: str) -> tuple[bool, bool, float]:
            folder = _folder(scope)
            return folder in mine, folder not in all_visited, self._recorded.get(scope, 0)

        scope = max(self.workqueue, key=preference)
        mine.add(_folder(scope))
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def _folder(scope: str) -> str:
    """Return the folder, such as tests/unit/trainer or packages/page/tests, whose imports a scope needs."""
    return "tests/unit/inference" if scope in IMPORT_VLLM else "/".join(scope.split("/")[:3])


def pytest_configure() -> None:
    """Handle the signals that a shell or nohup ignores: tests send them to processes, which inherit this."""
    provide_libnuma()  # some tests load vLLM's kernels
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header() -> str:
    """Announce the time without output, which starts after the header."""
    return "collecting: each worker imports all tests first, which takes a minute on free cores"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--extended`, which stands beside `-m`: that selects among the other marks."""
    parser.addoption("--extended", action="store_true", help="run the tests marked extended as well")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the modules, while they are imported and afterwards: a third of the time goes to it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that are extended as a whole before they are imported, which takes a third of the collection."""
    if collection_path.suffix != ".py" or _runs_extended(config):
        return None
    return True if _EXTENDED_FILE.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the extended tests, with any `-m` that does not name them, unless `--extended` is given.

    `extended(after=n)` leaves out the cases of a parametrized test after the first n.
    """
    if _runs_extended(config):
        return
    num_cases, kept, extended = Counter[str](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        mark, function = item.get_closest_marker("extended"), item.nodeid.partition("[")[0]
        num_cases[function] += 1
        (kept if mark is None or num_cases[function] <= mark.kwargs.get("after", 0) else extended).append(item)
    config.hook.pytest_deselected(items=extended)
    items[:] = kept


def _runs_extended(config: pytest.Config) -> bool:
    return bool(config.getoption("extended") or "extended" in config.getoption("markexpr"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Divide the tests among the workers."""
    config.option.loadscopereorder = False
    return ByImports(config, log)


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    """What has been logged so far in this process, a line each."""
    lines = list[str]()
    handler = logger.add(lambda message: lines.append(str(message).rstrip()), format="{message}")
    yield lambda: lines
    logger.remove(handler)
