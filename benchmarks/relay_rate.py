"""Time from the publication of a version to its copy on another host, over a network of limited rate.

    sudo .venv/bin/python benchmarks/relay_rate.py --megabytes 1190 --rate 10 --json benchmarks/results/relay_rate.json

Two hosts (`tests/support/network_hosts.py`) run `relay`: one serves the run directory, one copies the versions. First a
full version is published, then versions with `--changed` of the weights changed, as deltas, each when the copy of the
one before is complete. Weights are random and in half precision; changes are of one unit in the last place.

The result has for the full version, and for the deltas (medians): `megabytes` in files, `seconds` from the rename of
the version to the rename of its copy, and `megabytes_per_second`, their quotient.
"""

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.command import clean_environment
from tests.support.deltas import publish_delta, publish_full
from tests.support.network_hosts import NetworkHost, network_hosts

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.paths import RunPaths

_NUM_TENSORS = 16
_PORT = 8430
_TIMEOUT_SECONDS = 900


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1190, help="size of the full version")
    parser.add_argument("--changed", type=float, default=0.02, help="share of the weights that a version changes")
    parser.add_argument("--deltas", type=int, default=5, help="number of deltas")
    parser.add_argument("--rate", type=float, default=10, help="limit of each host in MB/s")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relay_rate-") as root, network_hosts(["source", "target"]) as hosts:
        result = measure(Path(root), hosts, options)
    chosen = {key: value for key, value in vars(options).items() if key != "json"}
    text = json.dumps({"options": chosen, **result}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


def measure(root: Path, hosts: list[NetworkHost], options: argparse.Namespace) -> dict[str, Any]:
    """Publish and copy all versions."""
    source, target = hosts
    run, copy = RunPaths(root / "run"), RunPaths(root / "copy")
    environment = clean_environment() | {"RELAY_API_KEY": secrets.token_hex(16)}
    for host, directory, arguments in (
        (source, run, []),
        (target, copy, ["--trainer", f"http://{source.address}:{_PORT}"]),
    ):
        host.limit_rate(options.rate)
        command = [sys.executable, "-m", "prime_rl_relay", str(directory.root), "--host", host.address]
        host.start([*command, *arguments], root / f"{host.name}.log", environment)
    random = np.random.default_rng(0)
    size = int(options.megabytes * 1e6 / 2 / _NUM_TENSORS)
    tensors = {
        f"layer_{i:02}": random.standard_normal(size, np.float32).astype(np.float16) for i in range(_NUM_TENSORS)
    }
    publish_full(run.weights(1), tensors, PolicyVersion(0, 1))
    full = time_copy(run.weights(1), copy.weights(1))
    deltas = []
    for step in range(2, options.deltas + 2):
        changed = {name: change(tensor, options.changed, random) for name, tensor in tensors.items()}
        publish_delta(run.weights(step), tensors, changed, PolicyVersion(0, step))
        deltas.append(time_copy(run.weights(step), copy.weights(step)))
        tensors = changed
    return {"full": full, "delta": {key: statistics.median(one[key] for one in deltas) for key in full}}


def change(tensor: Any, share: float, random: np.random.Generator) -> Any:
    """Change a share of the elements by one unit in the last place."""
    bits = tensor.view(np.uint16).copy()
    where = random.integers(0, len(bits), int(share * len(bits)))
    bits[where] ^= 1
    return bits.view(np.float16)


def time_copy(source: Path, target: Path) -> dict[str, float]:
    """Wait for the copy of a version that was just published."""
    begin = time.monotonic()
    while not target.exists():
        if time.monotonic() - begin > _TIMEOUT_SECONDS:
            raise SystemExit(f"error: {target} did not appear within {_TIMEOUT_SECONDS} s")
        time.sleep(0.005)
    seconds = time.monotonic() - begin
    megabytes = sum(file.stat().st_size for file in source.iterdir()) / 1e6
    return {
        "megabytes": round(megabytes, 2),
        "seconds": round(seconds, 2),
        "megabytes_per_second": round(megabytes / seconds, 2),
    }


if __name__ == "__main__":
    main()
