"""Which tests run, and on which worker: a file stays together, so does a folder whose files share a server."""

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from loguru import logger
from xdist.scheduler import LoadScopeScheduling

SHARED = ("tests/integration/inference/", "tests/integration/rl/shared_server/")
IMPORT_VLLM = ("tests/unit/trainer/test_rope.py",)  # as tests/unit/inference does
SECONDS = {  # the scopes that take longest, rounded; the others count as 0
    # With the extended tests:
    "tests/unit/environments/test_wheels.py": 400,
    "tests/integration/slurm/test_slurm_runs.py": 400,
    "tests/integration/api/test_documented_programs.py": 360,
    "tests/integration/nodes/test_ssh_hosts.py": 250,
    "tests/integration/page/test_live_run.py": 150,
    "tests/integration/relay/test_several_hosts.py": 150,
    "tests/integration/rl/test_code_tests.py": 140,
    "tests/integration/rl/test_local_environments.py": 140,
    "tests/integration/rl/test_restarts.py": 140,
    "tests/unit/trainer/test_activation_memory.py": 130,
    "tests/integration/rl/test_aqua_rat.py": 110,
    "tests/integration/api/test_process_cleanup.py": 90,
    "tests/integration/rl/test_doctor.py": 80,
    "tests/unit/test_install.py": 80,
    "tests/integration/api/test_guide_programs.py": 70,
    "tests/chaos/test_two_servers.py": 60,
    "tests/integration/api/test_first_script.py": 50,
    "tests/integration/trainer/test_two_nodes.py": 50,
    "tests/unit/benchmarks/test_scale.py": 50,
    "tests/unit/test_slurm.py": 50,
    "tests/integration/rl/test_mixture.py": 40,
    # Without them:
    "tests/integration/inference/": 160,
    "tests/integration/rl/shared_server/": 80,
    "tests/unit/orchestrator/test_orchestrator.py": 60,
    "tests/unit/trainer/test_checkpoint_worlds.py": 45,
    "tests/unit/trainer/test_fake_cuda.py": 35,
    "tests/unit/rollouts/test_environment_pool.py": 30,
    "tests/unit/rollouts/test_worker_launcher.py": 30,
    "tests/unit/trainer/test_parallel.py": 30,
    "tests/unit/benchmarks/test_simulation.py": 25,
    "tests/unit/configs/test_every_key.py": 25,
    "tests/unit/orchestrator/test_trainer_rollback.py": 25,
    "tests/unit/rollouts/test_verifiers_v1.py": 25,
    "tests/unit/supervisor/test_supervisor.py": 25,
    "tests/unit/trainer/test_checkpoint_resume.py": 25,
    "tests/unit/trainer/test_rope.py": 20,
    "tests/unit/environments/test_environment_tools.py": 15,
    "tests/unit/sandbox/test_hostile_code.py": 15,
    "tests/unit/orchestrator/test_checkpoint.py": 15,
    "tests/unit/orchestrator/test_faults.py": 15,
    "tests/unit/trainer/test_lora.py": 15,
    "tests/unit/trainer/test_muon.py": 15,
    "tests/unit/evaluation/test_offline.py": 10,
    "tests/unit/trainer/sft/test_sharing.py": 10,
    "tests/unit/trainer/test_base_canary.py": 10,
    "tests/unit/trainer/test_publish_worlds.py": 10,
    "tests/unit/trainer/test_reference_logprobs.py": 10,
}


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
    Within these, the longest scope comes first, so that all workers end at about the same time.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._visited = defaultdict[Any, set[str]](set)  # folders by worker

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARED if nodeid.startswith(folder)), nodeid.split("::", 1)[0])

    def _assign_work_unit(self, node: Any) -> None:
        mine, all_visited = self._visited[node], set[str]().union(*self._visited.values())

        def preference(scope: str) -> tuple[bool, bool, int]:
            folder = _folder(scope)
            return folder in mine, folder not in all_visited, SECONDS.get(scope, 0)

        scope = max(self.workqueue, key=preference)
        mine.add(_folder(scope))
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def _folder(scope: str) -> str:
    """Return the folder below tests/unit or tests/integration whose imports a scope needs."""
    return "tests/unit/inference" if scope in IMPORT_VLLM else "/".join(scope.split("/")[:3])


def pytest_configure() -> None:
    """Handle the signals that a shell or nohup ignores: tests send them to processes, which inherit this."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--extended`, which stands beside `-m`: that selects among the other marks."""
    parser.addoption("--extended", action="store_true", help="run the tests marked extended as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the extended tests, with any `-m` that does not name them, unless `--extended` is given."""
    if config.getoption("extended") or "extended" in config.getoption("markexpr"):
        return
    extended = [item for item in items if item.get_closest_marker("extended")]
    config.hook.pytest_deselected(items=extended)
    items[:] = [item for item in items if not item.get_closest_marker("extended")]


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
