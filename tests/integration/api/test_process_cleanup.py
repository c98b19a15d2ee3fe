"""However a program ends, the processes of its run end within the documented time."""

import os
import signal

import pytest

from tests.integration.api.conftest import PROGRAM_TIMEOUT_SECONDS
from tests.support.command import END_TIMEOUT_SECONDS, until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

KEYS = """
import asyncio
import prime_rl as rl

run = rl.Run("configs/reverse_text/model", {"id": "reverse_text", "args": {"words": 200}}, output_dir="outputs",
             seq_len=64, config={"orchestrator.batch_size": 16, "orchestrator.sampling.max_tokens": 8})
"""
ASYNCHRONOUS = (
    KEYS
    + """
async def main():
    async with run:
        async for step in run:
            print("step", step.number)
            LAST

asyncio.run(main())
"""
)
# As in a notebook: an event loop runs, and the cell uses the plain form.
NOTEBOOK = (
    KEYS
    + """
async def cell():
    with run as active:
        for step in active:
            print("step", step.number)

asyncio.run(cell())
"""
)


def test_exception_in_the_loop(start):
    program = start(ASYNCHRONOUS.replace("LAST", "raise ZeroDivisionError('mine')"))
    assert program.process.wait(timeout=PROGRAM_TIMEOUT_SECONDS) == 1
    assert program.output.rstrip().endswith("ZeroDivisionError: mine")
    program.assert_nothing_left()


@pytest.mark.parametrize(
    ("text", "number"),
    [(ASYNCHRONOUS.replace("LAST", "pass"), signal.SIGINT), (NOTEBOOK, signal.SIGKILL)],
    ids=["ctrl_c", "kernel_restart"],
)
def test_signal(start, text, number):
    program = start(text)
    program.wait_for("step 1")
    os.kill(program.process.pid, number)
    until(lambda: program.process.poll() is not None, "the end of the program", END_TIMEOUT_SECONDS)
    program.assert_nothing_left()
