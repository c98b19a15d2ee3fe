"""`chat` in a pipe: with the server of the run, and with servers that it starts."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from prime_rl.entrypoints.chat import main
from tests.support.command import until
from tests.support.policy_server import policy_server
from tests.support.tiny_model import publish_weights

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A run with version 4, and its server."""
    run = tmp_path_factory.mktemp("run")
    publish_weights(run, MODEL, 4)
    with policy_server(run, 4) as server:
        yield run, server


@pytest.fixture
def chat(monkeypatch, capsys):
    """Run the command on lines of a pipe; return the exit code and what it prints."""

    def run_chat(run, lines, *arguments):
        monkeypatch.setattr("sys.argv", ["chat", str(run), *arguments])
        text = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        try:
            main()
        except SystemExit as error:
            return error.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run_chat


def test_chat_uses_the_server_of_the_run_and_shows_inert_text(served, chat):
    run, server = served
    code, out, error = chat(run, ["one", "two", "/reset", "three"], "--temperature", "0")
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
def test_chat_refuses_in_one_line(served, chat, lines, arguments, message):
    code, _, error = chat(served[0], lines, *arguments)
    assert code == 2 and re.fullmatch(message + ".*\n", error)


@pytest.mark.extended
def test_chat_starts_a_server_for_version_and_base_and_grades(tmp_path, chat):
    """A server at the run's address with other weights is not the run's."""
    publish_weights(tmp_path, MODEL, 4)
    with policy_server(tmp_path, 4) as server:
        server.policy["hash"] = "of another run"
        lines = ["/both", "abc", "/example 3"]
        code, out, error = chat(tmp_path, lines, "--temperature", "0", "--model", str(MODEL))
    assert code == 0, error
    assert not server.requests
    step, base = out.splitlines()[:2]
    assert step.startswith("step 4: ") and base.startswith("base: ") and step[8:] == base[6:]
    assert len(re.findall(r"^reward [\d.]+, ", out, re.MULTILINE)) == 2 and "reference answer: " in out


@pytest.mark.extended
def test_interrupted_chat_leaves_no_server(tmp_path):
    publish_weights(tmp_path, MODEL, 4)
    command = [sys.executable, "-m", "prime_rl.entrypoints.chat", str(tmp_path), "--model", str(MODEL)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
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
