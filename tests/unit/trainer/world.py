"""Starts real processes without the cost of their imports: a fork server has imported torch and transformers.

`run_world` runs a function on several gloo ranks with torchrun's environment, `run_command` runs an entry point.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "prime_rl.trainer.rl.train",
        "prime_rl.trainer.sft.train",
        "datasets",
        "pytest",
        "torch.utils.serialization.config",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "tests.support.tiny_model",
        "tests.support.frozen_imports",
    ]
)


def run_world(size, function, argument, tmp_path, timeout=200, lost=()):
    """Return, per rank, what `function(world, argument)` returned; fail with the traceback of a rank that raised.

    Ranks in `lost` are not expected to answer or to end; they are left out.
    """
    # As torchrun does, this process keeps the store: a port that is free now may be another process's a second later.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = [Path(tmp_path) / f"result{size}.{rank}" for rank in range(size)]
    processes = [
        _context.Process(target=_run_rank, args=(rank, size, store.port, function, argument, str(result)))
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


def run_command(command, arguments, timeout=120, env=None, ranks=1):
    """Run the entry point `command` ("trainer", "sft") on each rank; return rank 0's exit code and its stderr."""
    arguments = list(map(str, arguments))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    with tempfile.NamedTemporaryFile("r") as error:
        processes = []
        for rank in range(ranks):
            settings = {"OMP_NUM_THREADS": "1", **(_rank_environment(rank, ranks, store.port) if store else {})}
            stderr = error.name if rank == 0 else os.devnull
            call = (command, arguments, stderr, settings | (env or {}))
            processes.append(_context.Process(target=_run_main, args=call))
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.kill()
        if alive:
            raise TimeoutError(f"{command} did not end within {timeout} s: {error.read()[-3000:]}")
        return processes[0].exitcode, error.read()


def _rank_environment(rank, size, port):
    """Return the variables that torchrun sets for a rank."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _run_main(command, arguments, error, env):
    with Path(error).open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [command, *arguments]
    os.environ |= env
    importlib.import_module(f"prime_rl.entrypoints.{command}").main()


def _run_rank(rank, size, port, function, argument, result):
    import torch

    from prime_rl.trainer.parallel.process_group import join_world

    torch.set_num_threads(1)
    os.environ |= _rank_environment(rank, size, port)
    try:
        with join_world("cpu", 120) as world:
            answer = {"value": function(world, argument)}
    except Exception:  # noqa: BLE001  handed to the test
        answer = {"error": traceback.format_exc()}
    Path(result).write_text(json.dumps(answer))
