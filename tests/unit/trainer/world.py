"""Real processes without their imports: forked from a server that has imported torch and transformers once.

`run_world` runs a function on several gloo ranks, described to each in its environment as torchrun does;
`run_command` runs an entry point.
"""

import importlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["prime_rl.trainer.rl.train", "prime_rl.trainer.sft.train", "datasets"])


def run_world(size, function, argument, tmp_path, timeout=120, lost=()):
    """Return, per rank, what `function(world, argument)` returned; fail with the traceback of a rank that raised.

    Ranks in `lost` are not expected to answer or to end; they are left out.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [Path(tmp_path) / f"result{size}.{rank}" for rank in range(size)]
    processes = [
        _context.Process(target=_run_rank, args=(rank, size, port, function, argument, str(result)))
        for rank, result in enumerate(results)
    ]
    for process in processes:
        process.start()
    for rank in lost:
        results.pop(rank)
    for rank, process in enumerate(processes):
        if rank not in lost:
            process.join(timeout)
    for rank in lost:
        processes.pop(rank).kill()
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck, f"{len(stuck)} of {size} ranks did not end"
    answers = [json.loads(result.read_text()) for result in results]
    assert not any("error" in answer for answer in answers), answers
    return [answer["value"] for answer in answers]


def run_command(command, arguments, timeout=120, env=None):
    """Run the entry point `command` ("trainer", "sft"); return its exit code and what it wrote to stderr."""
    with tempfile.NamedTemporaryFile("r") as error:
        process = _context.Process(target=_run_main, args=(command, list(map(str, arguments)), error.name, env))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{command} did not end within {timeout} s: {error.read()[-3000:]}")
        return process.exitcode, error.read()


def _run_main(command, arguments, error, env):
    with Path(error).open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [command, *arguments]
    os.environ |= {"OMP_NUM_THREADS": "1", **(env or {})}
    importlib.import_module(f"prime_rl.entrypoints.{command}").main()


def _run_rank(rank, size, port, function, argument, result):
    import torch

    from prime_rl.trainer.parallel import join_world

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with join_world("cpu", 60) as world:
            answer = {"value": function(world, argument)}
    except Exception:  # noqa: BLE001  handed to the test
        answer = {"error": traceback.format_exc()}
    Path(result).write_text(json.dumps(answer))
