"""How tests are divided among workers."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import SECONDS, ByImports

LONGEST = "tests/unit/trainer/test_checkpoint_worlds.py"


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


def divide(collection: list[str], num_workers: int) -> list[Worker]:
    """Run all tests in turns, one per worker, and return the workers."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(getvalue=lambda _: ["popen"] * num_workers, option=option)
    scheduler = ByImports(config, None)
    workers: list[Any] = [Worker(f"gw{i}", collection) for i in range(num_workers)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, collection)
    scheduler.schedule()
    while scheduler.has_pending:
        for worker in workers:
            if worker.num_run < len(worker.given):
                scheduler.mark_test_complete(worker, collection.index(worker.given[worker.num_run]))
                worker.num_run += 1
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


def test_longest_scope_starts_first() -> None:
    [worker] = divide([*files_of("configs", 2), f"{LONGEST}::test_it"], 1)
    assert worker.given[0] == f"{LONGEST}::test_it"


@pytest.mark.parametrize("scope", SECONDS)
def test_scopes_with_a_duration_exist(scope: str, request: pytest.FixtureRequest) -> None:
    assert (request.config.rootpath / scope).exists()
