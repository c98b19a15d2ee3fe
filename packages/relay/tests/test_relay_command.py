"""The command `relay` as a process."""

import os
import re
import resource
import signal
import subprocess
import sys

import pytest
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, clean_environment, until
from tests.support.relays import publish_bytes
from tests.support.server import free_port

from prime_rl.storage.paths import RunPaths
from prime_rl_relay.__main__ import main


def relay(*arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "prime_rl_relay", *map(str, arguments)],
        env=clean_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.extended
def test_two_relays_copy_a_version_and_end_with_sigterm(tmp_path):
    port, copy = free_port(), RunPaths(tmp_path / "copy")
    publish_bytes(tmp_path / "run", 1)
    first = relay(tmp_path / "run", "--port", port, RELAY_API_KEY="key")
    second = relay(copy.root, "--port", 0, "--trainer", f"http://127.0.0.1:{port}", RELAY_API_KEY="key")
    try:
        until(copy.weights(1).exists, "a copy")
        third = relay(copy.root, "--port", 0, "--trainer", f"http://127.0.0.1:{port}", RELAY_API_KEY="key")
        _, err = third.communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
        assert third.returncode == 1
        assert f"output_dir = {copy.root} is in use: process {second.pid} (" in err and "is its relay_trainer" in err
        assert (copy.weights(1) / "model.safetensors").read_bytes() == b"weights"
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGTERM)
    for process in (first, second):
        out, err = process.communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
        assert process.returncode == 0, err
        assert out.startswith("relay: http://127.0.0.1:") and "Traceback" not in err
    assert "copied weights/step_1" in err
    serving = re.search(r"http://127.0.0.1:(\d+)", out)
    assert (copy.logs_dir / f"relay_{os.uname().nodename}_{serving[1]}.log").read_text().count("copied weights") == 1


@pytest.mark.extended
def test_full_disk_ends_a_relay_with_its_directory(tmp_path):
    port, copy = free_port(), tmp_path / "copy"
    publish_bytes(tmp_path / "run", 1, bytes(1 << 20))
    first = relay(tmp_path / "run", "--port", port)
    second = relay(copy, "--port", 0, "--trainer", f"http://127.0.0.1:{port}")
    resource.prlimit(second.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    _, err = second.communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
    first.send_signal(signal.SIGTERM)
    assert second.returncode == 1 and first.wait(PROGRESS_TIMEOUT_SECONDS) == 0
    assert f"error: cannot copy files of the run: File too large: {copy} (" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--host", "0.0.0.0"), "error: --host 0.0.0.0: other machines could read the run without a key"),
        (("run", "--trainer", "node1:8430"), "'node1:8430' is not a URL such as http://node1:8430"),
        (("run", "--poll-seconds", "0"), "--poll-seconds must be above 0"),
        (("run", "--poll-seconds", "nan"), "--poll-seconds must be above 0"),
        (("run", "--port", "99999"), "--port must be between 0 and 65535"),
        (("run", "--trainer", "http://"), "'http://' is not a URL such as http://node1:8430"),
        (("run", "--host", "203.0.113.1", "--api-key-var", "KEY"), "cannot listen on 203.0.113.1:8430"),
        (("nosuch",), "error: nosuch is no directory, and there is nothing to serve; pass the output_dir of a run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", "key")
    monkeypatch.setattr("sys.argv", ["relay", *arguments])
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "nosuch").exists()
