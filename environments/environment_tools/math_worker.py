"""The process in which math-verify runs: reads one JSON request per line, and writes one JSON verdict per line.

What it parses was written by a model, and sympy may take any time or memory over it. So the kernel holds the limits:
the timer's default action ends the process, in the middle of C code too, which no Python handler could interrupt, and
nothing is left behind if the parent has gone meanwhile. The parent starts another one. The timer counts processor time:
on a busy machine the same answers are graded in time as on an idle one.
"""

import json
import logging
import os
import resource
import signal
import sys
from functools import partial
from typing import Any, TextIO


def main() -> None:
    """Serve requests `{"gold", "answers", "seconds", "relations"}` until stdin ends."""
    memory = int(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr; only verdicts reach the parent
    logging.disable(logging.WARNING)  # math-verify warns that we time it ourselves
    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

    # The box as a whole: of what it cannot parse, math-verify would take the last number. Its own timeouts are Python
    # signal handlers, which would take the alarm from us.
    boxes = (LatexExtractionConfig(boxed_match_priority=0),)
    read = partial(parse, extraction_config=boxes, extraction_mode="first_match", parsing_timeout=None)

    def grade(request: dict[str, Any]) -> dict[str, Any]:
        gold, *answers = (read(_boxed(text)) for text in (request["gold"], *request["answers"]))
        compare = partial(verify, gold, timeout_seconds=None, allow_set_relation_comp=request["relations"])
        return {"correct": all(map(compare, answers))}

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it closes our stdin
    grade(
        {"gold": "1", "answers": ["x+1"], "relations": False}
    )  # the first use of sympy takes a second; it must not delay an answer
    _send(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            verdict = grade(request)
        except Exception as error:  # noqa: BLE001 - sympy raises anything
            verdict = {"correct": False, "failure": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(replies, verdict)


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _send(replies: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=replies, flush=True)


if __name__ == "__main__":
    main()
