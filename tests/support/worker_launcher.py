"""A fork server whose workers find the environments of a test."""

import os
from contextlib import asynccontextmanager

from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher


@asynccontextmanager
async def launcher_with(packages):
    """Open a launcher; the workers import modules of the directory `packages`."""
    earlier = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(packages), *([earlier] if earlier else [])])
    try:
        async with WorkerLauncher() as launcher:
            yield launcher
    finally:
        if earlier is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = earlier
