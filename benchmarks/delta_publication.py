"""Cost of deltas for trainer and server beyond the codec: writing, keeping the base, rebuilding the full version.

    uv run --extra cpu python benchmarks/delta_publication.py --json benchmarks/results/delta_publication.json

Qwen3-0.6B's shapes in bfloat16, 1.19 GB, one file, one process; 2 % of the elements change by a unit or two between
versions. Prints wall seconds, and CPU seconds of the process, which do not depend on other load.

full, delta     `DeltaTransport.write_tensors` of a rank: file or delta, hashes, fsync, and the copy for the next base
first           `DeltaCache.complete` of a full version: read, checked, written to `--cache`
next            the same for a delta whose base is in the cache
uncached        the same for a delta whose base is not in the cache: the full version and all later deltas
loading         `read_verified` of the result, the cost of every version
limits          one copy of the bytes in memory; one file of equal size written to `--cache`, not synced

`--json FILE` writes the figures.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.delta_cache import DeltaCache
from prime_rl.inference.worker.worker_weight_update import read_verified
from prime_rl.storage.artifact import WEIGHTS_FORMAT, begin_artifact, commit_artifact
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync.transport import DeltaTransport

LAYER = {
    "q_proj": (2048, 1024), "k_proj": (1024, 1024), "v_proj": (1024, 1024), "o_proj": (1024, 2048),
    "gate_proj": (3072, 1024), "up_proj": (3072, 1024), "down_proj": (1024, 3072),
}  # fmt: skip
LAYERS, VOCABULARY, HIDDEN = 28, 151936, 1024
SHARE = 0.02
VERSIONS = 4


def make_weights(layers: int) -> dict[str, Tensor]:
    """Draw the first version."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in LAYER.items()}
    shapes["embed"] = (VOCABULARY * layers // LAYERS, HIDDEN)
    return {
        name: torch.empty(s, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator) for name, s in shapes.items()
    }


def step(weights: dict[str, Tensor], seed: int) -> None:
    """Change a fraction of the elements in place, most of them by one unit in the last place."""
    random = np.random.default_rng(seed)
    for tensor in weights.values():
        words = tensor.view(torch.int16).reshape(-1).numpy()
        at = random.choice(words.size, int(SHARE * words.size), replace=True)
        words[at] += random.choice(np.array([-2, -1, 1, 2], np.int16), at.size, p=[0.07, 0.43, 0.43, 0.07])


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return the wall and CPU seconds of `work`."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def publish(deltas: DeltaTransport, weights: dict[str, Tensor], target: Path, number: int) -> dict[str, float]:
    """Publish a version like a trainer of one rank; return the cost of writing and the bytes."""
    deltas.begin(target.name, PolicyVersion(0, number), last=False)
    temporary = begin_artifact(target)
    hashes: dict[str, str] = {}
    cost = timed(lambda: hashes.update(deltas.write_tensors(temporary / "model.safetensors", weights)))
    whole = content_hash(hashes)
    fields = {"format": WEIGHTS_FORMAT, "branch": 0, "step": number, "tensors": hashes, "hash": whole}
    manifest = commit_artifact(temporary, target, fields | deltas.manifest_fields())
    deltas.complete(whole)
    return cost | {"bytes": sum(manifest["files"].values())}


def measure(root: Path, cache: Path, layers: int) -> dict[str, Any]:
    """Publish four versions and rebuild them."""
    weights = make_weights(layers)
    figures: dict[str, Any] = {"bytes": sum(tensor.nbytes for tensor in weights.values()), "share": SHARE}
    unused: Any = None
    world = World(rank=0, size=1, device=torch.device("cpu"))
    deltas = DeltaTransport(VERSIONS, unused, unused, world, unused, unused)
    for number in range(1, VERSIONS + 1):
        if number > 1:
            step(weights, number)
        figures["full" if number == 1 else "delta"] = publish(deltas, weights, root / f"step_{number}", number)
    here, uncached = DeltaCache(cache / "here"), DeltaCache(cache / "uncached")
    figures["first"] = timed(lambda: here.complete(root / "step_1", lambda: None))
    for number in range(2, VERSIONS + 1):
        figures["next"] = timed(lambda path=root / f"step_{number}": here.complete(path, lambda: None))
    newest = here.complete(root / f"step_{VERSIONS}", lambda: None)
    figures["loading"] = timed(lambda: _read_all(newest))
    shutil.rmtree(cache / "here")
    figures["uncached"] = timed(lambda: uncached.complete(root / f"step_{VERSIONS}", lambda: None))
    return figures | {"limits": measure_limits(weights, cache)}


def measure_limits(weights: dict[str, Tensor], cache: Path) -> dict[str, Any]:
    """Measure copying and writing the bytes alone."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def write() -> None:
        with (cache / "limit").open("wb") as file:
            for tensor in weights.values():
                file.write(tensor.view(torch.uint8).numpy().data)

    return {
        "copy": timed(lambda: [copies[name].copy_(tensor) for name, tensor in weights.items()]),
        "write": timed(write),
    }


def _read_all(directory: Path) -> None:
    hashes = json.loads((directory / "manifest.json").read_text())["tensors"]
    for _ in read_verified(directory, hashes):
        pass


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS, help="number of layers")
    parser.add_argument("--cache", type=Path, help="folder of the server's cache; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir=options.cache) as cache:
        figures = measure(Path(root), Path(cache), options.layers)
    print(f"{figures['bytes'] / 1e9:.2f} GB, {SHARE:.0%} changed, delta {figures['delta']['bytes'] / 1e6:.1f} MB")
    for name, cost in [*figures.items(), *figures["limits"].items()]:
        if isinstance(cost, dict) and "s" in cost:
            print(f"{name:8} {cost['s']:6.2f} s   {cost['cpu_s']:6.2f} s CPU")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
