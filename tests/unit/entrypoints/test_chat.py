"""`chat` in a pipe: with the server of the run, and with servers that it starts."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.command import until
from tests.support.policy_server import policy_server
from tests.support.tiny_model import publish_weights

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"


def command(run, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "prime_rl.entrypoints.chat", str(run), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def chat(run, lines, *arguments):
    process = command(run, *arguments)
    out, error = process.communicate("".join(f"{line}\n" for line in lines), timeout=280)
    return process.returncode, out, error


def test_chat_uses_the_server_of_the_run_and_shows_inert_text(tmp_path):
    publish_weights(tmp_path, MODEL, 4)
    with policy_server(tmp_path, 4) as server:
        code, out, error = chat(tmp_path, ["one", "two", "/reset", "three"], "--temperature", "0")
    assert code == 0, error
    assert out == "step 4: abc\\x1b[2J<b>\n" * 3
    contents = [[message["content"] for message in body["messages"]] for body in server.requests]
    assert contents == [["one"], ["one", "abc\x1b[2J<b>", "two"], ["three"]]
    assert {(body["temperature"], body["max_tokens"]) for body in server.requests} == {(0, 8)}


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ([], ["--step", "9"], "error: .* has no weights of step 9"),
        (["/exmaple 3"], [], "error: there is no command /exmaple 3; /help lists them"),
        (["/example other 3"], [], "error: there is no environment other; the run has reverse_text"),
    ],
)
def test_chat_refuses_in_one_line(tmp_path, lines, arguments, message):
    publish_weights(tmp_path, MODEL, 4)
    with policy_server(tmp_path, 4):
        code, _, error = chat(tmp_path, lines, *arguments)
    assert code == 2 and re.fullmatch(message + ".*\n", error)


@pytest.mark.extended
def test_chat_starts_a_server_for_version_and_base_and_grades(tmp_path):
    """A server at the run's address with other weights is not the run's."""
    publish_weights(tmp_path, MODEL, 4)
    lines = ["/both", "abc", "/example 3"]
    with policy_server(tmp_path, 4) as server:
        server.policy["hash"] = "of another run"
        code, out, error = chat(tmp_path, lines, "--temperature", "0", "--model", str(MODEL))
    assert code == 0, error
    assert not server.requests
    step, base = out.splitlines()[:2]
    assert step.startswith("step 4: ") and base.startswith("base: ") and step[8:] == base[6:]
    assert len(re.findall(r"^reward [\d.]+, ", out, re.MULTILINE)) == 2 and "reference answer: " in out


@pytest.mark.extended
def test_interrupted_chat_leaves_no_server(tmp_path):
    publish_weights(tmp_path, MODEL, 4)
    process = command(tmp_path, "--model", str(MODEL), start_new_session=True)
    try:
        process.stdin.write("abc\n")
        process.stdin.flush()
        parent = psutil.Process(process.pid)
        until(lambda: bool(parent.children(recursive=True)), "a server starts")
        children = parent.children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(90) == 130
        assert not psutil.wait_procs(children, timeout=30)[1]
    finally:
        process.kill()
