"""`torchrun` reports the rank that a signal killed first, and listens on the loopback interface only."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from prime_rl.configs.training.broadcast import ALLOCATOR_VARIABLES
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core import import_utils, os_errors
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.parent_process import LAUNCHER
from prime_rl.trainer import torchrun
from prime_rl.trainer.parallel.process_group import choose_gloo_interface, join_world
from prime_rl.trainer.process_setup import limit_process
from prime_rl.trainer.rank_start import expand_segments
from prime_rl.trainer.torchrun import describe_first_failure
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, until
from tests.unit.trainer.world import run_world

TORCHRUN = [sys.executable, "-m", "prime_rl.trainer.torchrun", "--standalone"]


def failed(**ranks) -> ChildFailedError:
    """Ranks by (exit code, seconds)."""
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {
        int(name[1:]): SimpleNamespace(exitcode=code, timestamp=when, pid=100 + int(name[1:]))
        for name, (code, when) in ranks.items()
    }
    return error


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"r1": (-9, 5), "r0": (1, 5), "r2": (-15, 5)}, "rank 1 (pid 101) was killed by SIGKILL, perhaps out of mem"),
        ({"r0": (1, 5), "r1": (-9, 8)}, None),  # the kill is torchrun's
        ({"r0": (1, 5), "r1": (-15, 5)}, None),
        ({"r0": (-6, 5), "r1": (-9, 5)}, "rank 1 (pid 101) was killed by SIGKILL"),
        ({"r0": (-6, 5), "r1": (-15, 6)}, "rank 0 (pid 100) was killed by SIGABRT"),
        ({"r0": (-7, 5)}, "rank 0 (pid 100) was killed by SIGBUS, perhaps because a disk or /dev/shm is full"),
    ],
)
def test_describe_first_failure_ignores_ranks_that_torchrun_terminated(ranks, said):
    cause = describe_first_failure(failed(**ranks), os_errors.count_oom_kills())
    assert cause is None if said is None else cause.startswith(said)


@pytest.mark.parametrize(
    ("kills", "said"), [(3, "the kernel has killed a process because memory ran out"), (4, "perhaps")]
)
def test_describe_first_failure_reports_oom_kill(monkeypatch, kills, said):
    monkeypatch.setattr("prime_rl.trainer.torchrun.describe_signal", os_errors.describe_signal)
    monkeypatch.setattr(os_errors, "count_oom_kills", lambda: 4)
    assert said in (describe_first_failure(failed(r0=(-9, 1)), kills) or "")


def test_main_sets_launcher_pid_for_ranks(monkeypatch):
    told = []
    monkeypatch.setenv(LAUNCHER, "")
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(torchrun, "torchrun", lambda: told.append(os.environ[LAUNCHER]))
    torchrun.main()
    assert told == [str(os.getpid())]


def test_rank_exits_if_torchrun_died_during_imports():
    """The next one to start on this directory would find it at work."""
    program = "import sys; from prime_rl.liveness.parent_process import die_with_parent; die_with_parent(1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PROGRESS_TIMEOUT_SECONDS)
    assert done.returncode == 1, done.stderr
    assert b"the process that started this one has exited" in done.stderr


@contextmanager
def torchrun_of(tmp_path, body, *prefix):
    """Start a real torchrun whose only rank runs `body`, which finds a directory `here`; kill it in the end."""
    imports = "import pathlib, signal, sys, time\nhere = pathlib.Path(sys.argv[1])\n"
    (tmp_path / "rank.py").write_text(imports + body)
    command = [*prefix, *TORCHRUN, "--nproc-per-node=1", str(tmp_path / "rank.py"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


WAIT = "while not (here / 'go').exists(): time.sleep(0.05)\n"


@pytest.mark.extended
def test_torchrun_signal_ignored_at_start_stays_ignored(tmp_path):
    """A real torchrun under nohup, which gets SIGHUP as its terminal is closed."""
    body = "(here / 'up').write_text(str(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN))\n" + WAIT
    with torchrun_of(tmp_path, body, "nohup") as process:
        until((tmp_path / "up").exists, "the rank")
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert process.wait(PROGRESS_TIMEOUT_SECONDS) == 0
        assert (tmp_path / "up").read_text() == "True"


@pytest.mark.extended
def test_torchrun_second_sigterm_does_not_interrupt_the_wait_for_the_ranks(tmp_path):
    """A rank that saves a checkpoint for longer than the time between two signals."""
    body = "signal.signal(signal.SIGTERM, lambda *_: (here / 'asked').touch())\n(here / 'up').touch()\n"
    with torchrun_of(tmp_path, body + WAIT + "(here / 'saved').touch()\n") as process:
        for name in ("up", "asked"):
            until((tmp_path / name).exists, name)
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its rank
            process.wait(1)
        (tmp_path / "go").touch()
        assert process.wait(PROGRESS_TIMEOUT_SECONDS) == 128 + signal.SIGTERM
        assert (tmp_path / "saved").exists()
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.extended
def test_cause_replaces_error_files_of_other_ranks(tmp_path):
    """A real torchrun whose second rank is killed, after the first has left its word."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"code": 1, "message": "rank 0 lost another rank", "attempt": "0"}))
    command = [*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "rank.py")]
    environment = {**os.environ, "PRIME_RL_ERROR_FILE": str(error), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    assert subprocess.run(command, env=environment, timeout=120, capture_output=True).returncode == 1
    message = json.loads(error.read_text())["message"]
    assert "rank 1 (pid " in message and "was killed by SIGKILL" in message


RANK = """
import json, os
import psutil, torch
from torch import distributed

distributed.init_process_group("gloo")
ours = torch.ones(1)
distributed.all_reduce(ours)
assert ours.item() == 2
if distributed.get_rank() == 0:
    connections = [psutil.Process(pid).net_connections("inet") for pid in (os.getppid(), os.getpid())]
    listening = [[c.laddr.ip for c in some if c.status == psutil.CONN_LISTEN] for some in connections]
    print(json.dumps([*listening, [os.environ["MASTER_ADDR"]]]))
distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.extended
def test_stores_and_gloo_listen_on_loopback_only(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [*TORCHRUN, "--nproc-per-node=2", str(script)]
    env = {key: value for key, value in os.environ.items() if key not in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert [set(addresses) for addresses in json.loads(done.stdout)] == [{"127.0.0.1"}] * 3, "of torchrun and its rank"


# The start of a rank: limits of its process, and the GPUs that it supports


def start_with_few_files(world, _):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    limit_process()
    return [*resource.getrlimit(resource.RLIMIT_NOFILE), hard]


def test_rank_raises_the_limit_of_open_files(tmp_path):
    """Each process group of gloo connects a rank with each other one: 1024 ranks exceed the usual limit of 1024."""
    for soft, hard, before in run_world(2, start_with_few_files, None, tmp_path):
        assert hard == before and soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


@pytest.fixture
def gpu(monkeypatch):
    """Simulate one GPU of the capability that the test sets in the returned dict."""
    found = {"capability": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found["capability"])
    values = {
        "cuda.is_available": True,
        "cuda.device_count": 1,
        "cuda.set_device": None,
        "cuda.get_device_name": "Tesla T4",
    }
    values |= {"init_process_group": None, "get_rank": 0, "get_world_size": 1, "destroy_process_group": None}
    for name, value in values.items():
        owner = "torch" if "cuda" in name else "torch.distributed"
        monkeypatch.setattr(f"{owner}.{name}", lambda *_, value=value, **__: value)
    return found


@pytest.mark.parametrize(("capability", "dtype"), [((6, 1), "auto"), ((7, 5), "auto"), ((7, 5), "bfloat16")])
def test_old_gpu_without_bfloat16_is_refused_in_one_line(gpu, capability, dtype):
    gpu["capability"] = capability
    message = r"Tesla T4 has compute capability .*set model\.dtype='float32'"
    with pytest.raises(ConfigError, match=message) as error, join_world("auto", 60, TrainerModelConfig(dtype=dtype)):
        pass
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), "float32"), ((8, 0), "auto"), ((12, 0), "bfloat16")])
def test_supported_gpu_is_used(gpu, capability, dtype):
    gpu["capability"] = capability
    with join_world("auto", 60, TrainerModelConfig(dtype=dtype)) as world:
        assert world.device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("transport", "user", "expected"),
    [
        ("filesystem", {}, "expandable_segments:True"),
        ("nccl", {}, "expandable_segments:True"),
        ("ipc", {}, None),
        ("filesystem", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("filesystem", {"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
    ],
)
def test_expand_segments_keeps_the_users_allocator_and_memory_for_ipc(monkeypatch, transport, user, expected):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    expand_segments(transport)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


# The interface of gloo on hosts whose names are those of the loopback interface


VARIABLE = "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("rank", "name", "variables", "interface"),
    [
        (0, "localhost", {}, "lo"),  # the other node is this machine, too
        (1, "localhost", {}, "lo"),
        (1, "no-such-host.invalid", {}, "lo"),
        (1, "192.0.2.7", {}, None),  # the name is reachable
        (1, "localhost", {VARIABLE: "eth7"}, "eth7"),  # the user has set one
    ],
)
def test_interface_to_the_other_node_replaces_the_loopback_name(monkeypatch, rank, name, variables, interface):
    """Choose the interface of rank 0 or 1, each on a node of its own, whose host has this name."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    for key, value in {"MASTER_ADDR": "127.0.0.1", "GROUP_RANK": str(rank), **variables}.items():
        monkeypatch.setenv(key, value)
    store = dist.HashStore()
    if rank == 0:
        store.set("prime_rl/main_address", "127.0.0.1")
    choose_gloo_interface(store, rank, 2)
    assert os.environ.get(VARIABLE) == interface


# The commands start without torch, and explain in one line how to install it


def test_missing_torch_exits_with_one_line_that_names_the_command(monkeypatch):
    monkeypatch.setattr(import_utils, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="uv sync --extra cpu") as caught:
        import_utils.require_packages("torch")
    assert "\n" not in str(caught.value)


def test_invalid_keys_exit_before_torch_is_imported():
    code = (
        "import sys; sys.argv = ['trainer', '--no-such-key', '1']\n"
        "from prime_rl.entrypoints import sft, trainer\n"
        "try:\n    trainer.main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
