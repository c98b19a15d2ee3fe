"""Log files of processes that run without `rl`."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time

import pytest

from prime_rl.core import logs
from prime_rl.storage.paths import RunPaths

PROCESS = """
import logging, multiprocessing, os, sys
from pathlib import Path
from loguru import logger
from prime_rl.core import logs
from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import ConfigError
from prime_rl.core.logs import set_up_logging
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths

paths, what = RunPaths(Path(sys.argv[1])), sys.argv[2]
def log_as_an_engine(number):
    logs.share_log_file().handle(logging.makeLogRecord({"msg": f"engine {number}\\x1b " + "x" * 30}))
def main():
    set_up_logging("info", True, paths.log("trainer"))
    set_up_logging("info", True, paths.log("trainer"))  # as a command that calls another one
    with HeartbeatWriter(paths, "trainer_0", "trainer"):
        logger.info("100% of {} rollouts", 7)
        if what == "config":
            raise ConfigError("bad \\x1b[2J key")
        if what == "defect":
            raise KeyError("defect")
        if what == "engine":
            handler = logs.share_log_file()
            handler.maxBytes = 5000
            with multiprocessing.get_context(sys.argv[3]).Pool(1) as pool:
                for number in range(100):
                    pool.apply(log_as_an_engine, (number,))
                    logger.info("server {} {}", number, "x" * 30)
        if what == "full":
            logs._current.stream.close()
            logs._current.stream = open("/dev/full", "w")
            logger.info("lost")
            logger.info("after")
if __name__ == "__main__":
    run_main(main)
"""


def start(tmp_path, what="", method="", **kwargs):
    program = tmp_path / "program.py"  # a file: processes that are not forked import it
    program.write_text(PROCESS)
    command = [sys.executable, str(program), str(tmp_path), what, method]
    return subprocess.run(command, text=True, timeout=240, **({"stderr": subprocess.PIPE} | kwargs))


def read(tmp_path):
    return (tmp_path / "logs" / "trainer.log").read_text()


def test_log_file_has_the_lines_of_stderr_once_and_the_error_that_ends_each_start(tmp_path):
    done = start(tmp_path)
    first, *lines = read(tmp_path).splitlines()
    assert re.match(r"--- pid \d+ on \S+ starts, ", first)
    assert [line.split(maxsplit=1)[1].split() for line in lines] == [["INFO", "100%", "of", "7", "rollouts"]]
    assert "100% of 7 rollouts" in done.stderr
    heartbeat = json.loads(RunPaths(tmp_path).heartbeat("trainer_0").read_text())
    assert heartbeat["log"] == str(tmp_path / "logs" / "trainer.log")
    for what, code, line in (("config", 2, "error: bad "), ("defect", 1, "KeyError: 'defect'")):
        done = start(tmp_path, what)
        assert done.returncode == code and line in done.stderr
        assert line in read(tmp_path) and "\x1b" not in read(tmp_path)
    assert read(tmp_path).count("100% of 7 rollouts") == 3, "a restart appends"


def test_log_is_not_written_twice_if_stderr_goes_to_the_folder(tmp_path):
    logs = tmp_path / "logs" / "torchrun"
    logs.mkdir(parents=True)
    with (logs / "stderr.log").open("w") as file:
        start(tmp_path, stderr=file)
    assert not (tmp_path / "logs" / "trainer.log").exists()
    heartbeat = json.loads(RunPaths(tmp_path).heartbeat("trainer_0").read_text())
    assert heartbeat["log"] == str(logs / "stderr.log")


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_engine_appends_to_the_log_of_its_server_also_after_a_rotation(tmp_path, method):
    start(tmp_path, "engine", method=method)
    old, new = (tmp_path / "logs" / f"trainer.log{suffix}" for suffix in (".1", ""))
    assert 2000 < old.stat().st_size <= 5200 and "server 99" in new.read_text()
    numbers = [int(number) for number in re.findall(r"engine (\d+)\\x1b x", old.read_text() + new.read_text())]
    assert len(numbers) > 30 and numbers == list(range(numbers[0], 100)), "none is lost"


def test_log_file_that_cannot_be_opened_or_written_is_a_warning(tmp_path):
    done = start(tmp_path, "full")
    assert done.returncode == 0
    assert done.stderr.count("trainer.log ends here: [Errno 28]") == 1 and "INFO    after" in done.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").write_text("a file")
    done = start(tmp_path / "other")
    assert done.returncode == 0 and "100% of 7 rollouts" in done.stderr
    assert f"the log goes to stderr only: {tmp_path}/other/logs/trainer.log cannot be written: " in done.stderr


def test_log_of_a_process_that_keeps_its_file_open_is_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    monkeypatch.setattr(logs, "_INTERVAL_SECONDS", 0.01)
    path, old = tmp_path / "inference.log", tmp_path / "inference.log.1"
    with path.open("ab", buffering=0) as file, logs.rotating_logs(tmp_path):
        file.write(b"a" * 1001)
        while path.stat().st_size:
            time.sleep(0.005)
        assert old.read_bytes() == b"a" * 1001
        file.write(b"b" * 999)
    assert path.read_bytes() == b"b" * 999, "not after a hole of a thousand zeros"
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"c" * 9)
        logs.rotate_large_logs(tmp_path)
    assert old.read_bytes() == b"a" * 1001, "while another process rotates it"
    os.truncate(path, 999)
    logs.rotate_large_logs(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, old.name] and path.stat().st_size == 999


def test_log_hint_names_an_existing_file_only(tmp_path):
    paths = RunPaths(tmp_path)
    assert paths.log_hint("trainer") == ""
    paths.logs_dir.mkdir()
    paths.log("trainer_rank_0").touch()
    assert paths.log_hint("trainer") == f" (log {paths.log('trainer_rank_0')})"
    paths.log("trainer").touch()
    assert paths.log_hint("trainer") == f" (log {paths.log('trainer')})"
