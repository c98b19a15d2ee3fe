"""Grades mathematical answers with math-verify in separate processes, which a hostile text can only end."""

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("math_worker.py")
MEMORY = 2 << 30


@dataclass(frozen=True)
class Verdict:
    """The result of grading one answer.

    `failure` is the reason why it could not be graded: "timeout", "crash", "too long" or the name of an exception. Such
    an answer is not correct.
    """

    correct: bool
    failure: str | None = None


class GraderBroken(RuntimeError):
    """The grading process does not even start. Not the answer's fault, so no verdict on it."""


class MathGrader:
    """A few processes with math-verify, started when first needed and again after each that died.

    Works in any thread and event loop, and needs no main thread: the limits are the kernel's (see `math_worker`).
    """

    def __init__(self, seconds: float = 5.0, max_chars: int = 1000, workers: int = 4, memory: int = MEMORY) -> None:
        """Make a grader.

        Args:
            seconds: processor time for one answer.
            max_chars: a longer answer is not graded.
            workers: how many processes grade at a time; started as they are needed.
            memory: bytes that each process may address.

        Raises:
            ValueError: a limit that is not positive, or math-verify is not installed.
        """
        if seconds <= 0 or max_chars < 1 or workers < 1:
            raise ValueError(f"seconds ({seconds}), max_chars ({max_chars}) and workers ({workers}) must be positive")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("math-verify is not installed; run `uv pip install math-verify`")
        self._seconds = seconds
        self._max_chars = max_chars
        self._memory = memory
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-grader")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: list[subprocess.Popen[str]] = []
        self._is_closed = False

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Return whether `answer` equals `gold`; both are what stands in a box.

        Takes `seconds` of processor time at most, and those before it in the queue as much again.

        Raises:
            GraderBroken: the process does not start.
        """
        if same_text(gold, answer):
            return Verdict(correct=True)
        if not answer:
            return Verdict(correct=False)
        if len(answer) > self._max_chars:
            return Verdict(correct=False, failure="too long")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, gold, answer)

    def _ask(self, gold: str, answer: str) -> Verdict:
        """Run in one of the threads, each of which owns a process."""
        worker: subprocess.Popen[str] | None = getattr(self._own, "worker", None)
        if worker is None or worker.poll() is not None:
            worker = self._own.worker = _start(self._memory)
            with self._lock:
                self._workers.append(worker)
                if self._is_closed:  # while it was started
                    worker.kill()
        request = {"gold": gold, "answer": answer, "seconds": self._seconds}
        assert worker.stdin and worker.stdout
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            reply = worker.stdout.readline()
        except OSError:
            reply = ""
        if not reply:
            self._workers.remove(worker)
            self._own.worker = None
            timed_out = _end(worker) == -signal.SIGPROF
            return Verdict(correct=False, failure="timeout" if timed_out else "crash")
        verdict = json.loads(reply)
        return Verdict(verdict["correct"], verdict.get("failure"))

    def close(self) -> None:
        """End the processes; no answer can be graded afterwards. They also exit when this program dies."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()  # a thread that waits for its verdict reads the end of its output
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            _end(worker)
        self._workers.clear()


def same_text(gold: str, answer: str) -> bool:
    """Compare without any mathematics, spaces aside: what math-verify cannot parse may still be the same."""
    return "".join(gold.split()) == "".join(answer.split()) != ""


def _start(memory: int) -> "subprocess.Popen[str]":
    # -I and the file itself: neither the working directory nor this package's import decides what runs there.
    command = [sys.executable, "-I", str(WORKER), str(memory)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert worker.stdout
    if "ready" not in worker.stdout.readline():
        raise GraderBroken(f"the grading process ended with exit status {worker.wait()}; run {' '.join(command)}")
    return worker


def _end(worker: "subprocess.Popen[str]") -> int:
    """Take the exit status of a process that has ended or is about to; negative is the signal that ended it."""
    try:
        status = worker.wait(timeout=5)
    except subprocess.TimeoutExpired:
        worker.kill()
        status = worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # what was still to be written has no reader any more
    return status
