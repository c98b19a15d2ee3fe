"""Which tests a command line selects, and how they are divided among workers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.run_order import CLONE, ByImports


class Worker:
    """Records the tests that it is given."""

    shutting_down = False

    def __init__(self, name: str, collection: list[str]) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.collection = collection
        self.given: list[str] = []
        self.num_run = 0

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [self.collection[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def folders(self) -> list[str]:
        return list(dict.fromkeys(test.split("/")[2] for test in self.given))


def divide(
    collection: list[str],
    num_workers: int,
    cache: dict[str, Any] | None = None,
    seconds: dict[str, float] | None = None,
) -> list[Worker]:
    """Run all tests in turns, one per worker, and return the workers."""
    cache, cleanups = {} if cache is None else cache, list[Callable[[], None]]()
    config: Any = SimpleNamespace(
        getvalue=lambda _: ["popen"] * num_workers,
        option=SimpleNamespace(loadscopereorder=False),
        cache=SimpleNamespace(get=cache.get, set=cache.__setitem__),
        add_cleanup=cleanups.append,
    )
    scheduler = ByImports(config, None)
    workers: list[Any] = [Worker(f"gw{i}", collection) for i in range(num_workers)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, collection)
    scheduler.schedule()
    while scheduler.has_pending:
        for worker in workers:
            if worker.num_run < len(worker.given):
                test = worker.given[worker.num_run]
                scheduler.mark_test_complete(worker, collection.index(test), (seconds or {}).get(test, 0.0))
                worker.num_run += 1
    for cleanup in cleanups:
        cleanup()
    return workers


def files_of(folder: str, num_files: int) -> list[str]:
    return [f"tests/unit/{folder}/test_{i}.py::test_{j}" for i in range(num_files) for j in range(4)]


def test_workers_run_their_own_folders_and_help_at_the_end() -> None:
    """With equal shares no folder is imported twice; a worker without a folder takes over files of another one."""
    workers = divide([*files_of("configs", 6), *files_of("trainer", 6)], 2)
    assert [worker.folders for worker in workers] == [["configs"], ["trainer"]]
    workers = divide([*files_of("configs", 2), *files_of("trainer", 10)], 2)
    assert [worker.folders for worker in workers] == [["configs", "trainer"], ["trainer"]]
    assert abs(len(workers[0].given) - len(workers[1].given)) <= 4


def test_each_test_runs_once_and_files_stay_together() -> None:
    collection = [*files_of("configs", 5), *files_of("storage", 3), *files_of("trainer", 7)]
    workers = divide(collection, 3)
    assert sorted(test for worker in workers for test in worker.given) == sorted(collection)
    for worker in workers:
        files = [test.split("::")[0] for test in worker.given]
        assert len(set(files)) == sum(1 for i, file in enumerate(files) if i == 0 or files[i - 1] != file)


def test_scope_that_took_longest_in_the_last_run_starts_first() -> None:
    collection, cache = files_of("configs", 3), dict[str, Any]()
    [worker] = divide(collection, 1, cache, seconds={collection[4]: 5.0, collection[5]: 2.0, collection[8]: 6.0})
    assert worker.given == collection, "nothing is recorded yet"
    [worker] = divide(collection, 1, cache)
    assert worker.given == [*collection[4:8], *collection[8:], *collection[:4]]


ROOT = Path(__file__).parents[2]


def test_record_of_a_fresh_clone_names_tests_that_exist() -> None:
    assert [scope for scope in json.loads(CLONE.read_text()) if not (ROOT / scope).exists()] == []


TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.gpu
def test_gpu(): pass

@pytest.mark.extended
def test_extended(): pass

@pytest.mark.extended
@pytest.mark.slow
def test_extended_slow(): pass
"""


CASES: list[tuple[list[str], set[str]]] = [
    ([], {"plain", "slow", "gpu"}),
    (["-m", "not gpu"], {"plain", "slow"}),
    (["-m", "not slow"], {"plain", "gpu"}),
    (["--extended"], {"plain", "slow", "gpu", "extended", "extended_slow"}),
    (["-m", "extended"], {"extended", "extended_slow"}),
    (["-m", "extended and not slow"], {"extended"}),
    (["-m", "not extended and not gpu"], {"plain", "slow"}),
    (["-m", "slow or gpu"], {"slow", "gpu"}),
    (["--extended", "-m", "extended"], {"extended", "extended_slow"}),
    (["--extended", "-m", "extended and not slow"], {"extended"}),
]
COLLECT_ALL = f"""
import pytest
for arguments, _ in {CASES}:
    print("case", flush=True)
    pytest.main(["--collect-only", "-q", "-n", "0", *arguments])
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each case; one process collects all, because the imports take two seconds."""
    root = tmp_path_factory.mktemp("selection")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests/support/run_order.py", root / "conftest.py")
    (root / "tests/test_it.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-c", COLLECT_ALL], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("case\n")[1:]


@pytest.mark.extended
@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(arguments) for arguments, _ in CASES])
def test_marks_select_the_documented_tests(outputs: list[str], number: int) -> None:
    assert len(outputs) == len(CASES)
    found = {line.split("::test_")[1] for line in outputs[number].splitlines() if "::test_" in line}
    assert found == CASES[number][1], outputs[number]
