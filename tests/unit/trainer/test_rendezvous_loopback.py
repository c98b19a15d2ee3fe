"""torchrun of `rl` listens on the loopback interface only."""

import json
import os
import subprocess
import sys

import pytest

RANK = """
import json, os, sys
import psutil, torch
from torch import distributed

distributed.init_process_group("gloo")
ours = torch.ones(1)
distributed.all_reduce(ours)
assert ours.item() == 2
if distributed.get_rank() == 0:
    listening = {}
    for process in (psutil.Process(os.getppid()), psutil.Process()):
        sockets = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        listening[process.pid == os.getpid()] = sorted(c.laddr.ip for c in sockets)
    print(json.dumps({"agent": listening[False], "rank": listening[True], "at": os.environ["MASTER_ADDR"]}))
distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.extended
def test_stores_and_gloo_listen_on_loopback_only(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "prime_rl.trainer.torchrun", "--standalone", "--nproc-per-node=2", str(script)]
    env = {key: value for key, value in os.environ.items() if key not in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["agent"] and set(told["agent"]) == {"127.0.0.1"}, told
    assert told["rank"] and set(told["rank"]) == {"127.0.0.1"}, told
    assert told["at"] == "127.0.0.1"
