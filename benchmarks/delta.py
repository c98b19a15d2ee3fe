"""Size and speed of deltas, compared with the entropy of the changes and with XOR + zstd.

    uv run python benchmarks/delta.py --json benchmarks/results/delta.json
    uv run --extra cpu python benchmarks/delta.py --reverse-text outputs/delta      # real weights, three minutes more
    uv run python benchmarks/delta.py --pair run/weights/step_8 run/weights/step_9  # your own published weights

Synthetic weights: decoder layers of a 0.6B model in bfloat16, Gaussian with sigma 0.02; 1, 2 and 6 % of the elements
change between versions.

adam    simulated steps of Adam; the learning rate is chosen so that the last step changes this fraction
drawn   elements drawn at random, 85 % of them changed by one unit in the last place

over entropy     file size over N (H(p) + p H(steps)) / 8, the entropy of the changed elements and of their steps in
                 these weights (limit 1.0)
xor over delta   size of XOR with the base, tensor by tensor, compressed by zstd -1, over the file size
MB/s             model bytes per CPU second of one thread, best of three alternating rounds. Deltas include files and
                 all hashes, XOR + zstd does not

`--json FILE` writes the figures. The exit code is 1 if a result is not bit-identical to the new version.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.delta.container import Delta
from prime_rl.storage.delta.tensor_codec import encode_delta, patch_tensors
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.tensor_hashes import RawTensor, map_tensors

SHARES = (0.01, 0.02, 0.06)
LAYER = {
    "q_proj": (2048, 1024), "k_proj": (1024, 1024), "v_proj": (1024, 1024), "o_proj": (1024, 2048),
    "gate_proj": (3072, 1024), "up_proj": (3072, 1024), "down_proj": (1024, 3072),
    "input_layernorm": (1024,), "post_attention_layernorm": (1024,), "q_norm": (128,), "k_norm": (128,),
}  # fmt: skip
SIGMA = 0.02
STEPS, SIGNAL_TO_NOISE, BETAS = 8, 0.3, (0.9, 0.95)
ROUNDS = 3
BLOCK = 2**22
VERSIONS = PolicyVersion(0, 1), PolicyVersion(0, 2)

ROOT = Path(__file__).resolve().parents[1]
RATES = {
    "the recipe's rate": "--max-steps 12",
    "rate 1e-6": "--max-steps 8 --trainer.optim.lr 1e-6 --trainer.scheduler.warmup-steps 0 "
    "--trainer.scheduler.min-lr 1e-6",
}

Tensors = Mapping[str, RawTensor]
Words = NDArray[np.uint16]
Floats = NDArray[np.float32]


def main() -> int:
    arguments = parse_arguments()
    results: dict[str, Any] = {}
    if arguments.pair:
        results["pair"] = compare(*(map_tensors(directory) for directory in arguments.pair))
        print(f"{HEADER}\n{row('pair', results['pair'])}", flush=True)
    else:
        results |= {"delta": measure(arguments.layers, seed=arguments.seed), "drawn": {}}
        for share in SHARES:
            results["drawn"][str(share)] = compare(*drawn_pair(share, arguments.layers, arguments.seed))
        print(HEADER)
        for kind, name in (("delta", "adam"), ("drawn", "drawn")):
            print("\n".join(row(f"{name} {share}", figures) for share, figures in results[kind].items()), flush=True)
    if arguments.reverse_text:
        results["reverse_text"] = {
            name: reverse_text(arguments.reverse_text / f"run_{i}", RATES[name].split()) for i, name in enumerate(RATES)
        }
        print("\n".join(row(f"reverse_text, {name}", run) for name, run in results["reverse_text"].items()))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if '"exact": false' not in json.dumps(results) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="of 31 MB each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pair", type=Path, nargs=2, metavar="DIR", help="measure these weights instead")
    parser.add_argument(
        "--reverse-text", type=Path, metavar="DIR", help="run the CPU recipe in this folder and measure its weights"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def measure(layers: int = 2, shares: Sequence[float] = SHARES, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Measure pairs of a simulated Adam step.

    Returns:
        Requested fraction of changed values, as a string -> the figures of `compare`.
    """
    path = adam_path(layers, seed)
    return {str(share): compare(*adam_pair(path, share)) for share in shares}


# ----------------------------------------------------------------------------------------------------- weights


def adam_path(layers: int, seed: int) -> dict[str, tuple[Floats, Floats, Floats]]:
    """Simulate Adam at rate 1; return by tensor the weights and the sums of updates before and after the last step.

    Gradients do not depend on the weights, so another rate scales the path.
    """
    random = np.random.default_rng(seed)
    return {f"layers.{i}.{n}": adam_tensor(random, shape) for i in range(layers) for n, shape in LAYER.items()}


def adam_tensor(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
    def normal() -> Floats:
        return random.standard_normal(shape, np.float32)

    weights, mean = SIGMA * normal(), SIGNAL_TO_NOISE * normal()
    first, second, moved = (np.zeros(shape, np.float32) for _ in range(3))
    for step in range(1, STEPS + 1):
        gradient = mean + normal()
        first += (1 - BETAS[0]) * (gradient - first)
        second += (1 - BETAS[1]) * (gradient**2 - second)
        before = moved.copy()
        moved -= first / (1 - BETAS[0] ** step) / np.sqrt(second / (1 - BETAS[1] ** step))
    return weights, before, moved


def adam_pair(path: Mapping[str, tuple[Floats, Floats, Floats]], share: float) -> tuple[Tensors, Tensors]:
    """Return a pair whose last step changes `share` of the elements; find the rate on one tensor by bisection."""
    weights, before, after = next(iter(path.values()))
    low, high = np.float32(1e-9), np.float32(1e-2)
    for _ in range(30):
        rate = np.sqrt(low) * np.sqrt(high)
        changed = (bfloat16(weights + rate * before) != bfloat16(weights + rate * after)).mean()
        if changed > share:
            high = rate
        else:
            low = rate
    return tuple({n: raw(bfloat16(p[0] + rate * p[i])) for n, p in path.items()} for i in (1, 2))  # type: ignore[return-value]


def drawn_pair(share: float, layers: int, seed: int) -> tuple[Tensors, Tensors]:
    """Draw the changed elements and the sizes of their changes in units in the last place."""
    random = np.random.default_rng(seed)
    base = {
        f"layers.{i}.{n}": bfloat16(SIGMA * random.standard_normal(shape, np.float32))
        for i in range(layers)
        for n, shape in LAYER.items()
    }
    new = {}
    for name, words in base.items():
        sizes = np.where(random.random(words.shape) < 0.85, 1, 1 + random.geometric(0.4, words.shape))
        signed = np.where(random.random(words.shape) < 0.5, sizes, -sizes).astype(np.uint16)
        new[name] = np.where(random.random(words.shape) < share, words + signed, words)
    return {n: raw(words) for n, words in base.items()}, {n: raw(words) for n, words in new.items()}


def bfloat16(values: Floats) -> Words:
    """Round to the nearest bfloat16, ties to even; as bit patterns."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def raw(words: Words) -> RawTensor:
    return RawTensor("BF16", words.shape, words.reshape(-1).view(np.uint8))


# --------------------------------------------------------------------------------------------------- measuring


def compare(base: Tensors, new: Tensors, rounds: int = ROUNDS) -> dict[str, Any]:
    """Encode and decode one pair in both formats; check that the result equals `new`."""
    size = sum(tensor.data.size for tensor in new.values())
    counted = count(base, new)
    codec = pyarrow.Codec("zstd", compression_level=1)
    buffers = {name: RawTensor(t.dtype, t.shape, t.data.copy()) for name, t in base.items()}
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.process_time()
        result = call(*arguments)
        seconds.setdefault(name, []).append(time.process_time() - start)
        return result

    with tempfile.TemporaryDirectory() as directory:
        for i in range(rounds):
            delta: Delta = timed("encode", encode_delta, base, new, Path(directory) / f"{i}", *VERSIONS)
            packed: list[bytes] = timed("xor_encode", xor_zstd, codec, base, new)
            timed("xor_decode", undo_xor_zstd, codec, base, packed)
            for name, tensor in base.items():
                buffers[name].data[:] = tensor.data
            timed("decode", patch_tensors, buffers, delta)
        exact = same(buffers, new)
        stored = delta.path.stat().st_size
    xor = sum(map(len, packed))
    return {
        "over_entropy": stored / counted["entropy_bytes"],
        "xor_over_delta": xor / stored,
        **counted,
        "full_bytes": size,
        "delta_bytes": stored,
        "xor_zstd_bytes": xor,
        **{f"{name}_mb_s": size / min(times) / 1e6 for name, times in seconds.items()},
        "exact": exact,
    }


def count(base: Tensors, new: Tensors) -> dict[str, float]:
    """Count the changes.

    Returns:
        changed: fraction of the elements. one_unit: fraction of these that changed by one unit. entropy_bytes: entropy
        of the changed elements and their steps. given_exponent: the same entropy conditional on each element's
        exponent, which the reader has, over `entropy_bytes`.
    """
    hits, steps, exponents, placed_hits, placed_steps = (Tally() for _ in range(5))
    for before, after in (pair for name in new for pair in zip(numbers(base[name]), numbers(new[name]), strict=True)):
        step, exponent = after - before, np.where(before < 0, ~before, before) >> 7
        hit = step != 0
        hits.add(hit)
        exponents.add(exponent)
        placed_hits.add(2 * exponent + hit)
        hit = np.flatnonzero(hit)
        steps.add(step[hit])
        placed_steps.add((exponent[hit] << 16) + step[hit])
    total = hits.bits() + steps.bits()
    # Conditional entropy: the joint entropy minus that of the condition.
    which = placed_hits.bits() - exponents.bits()
    how_far = placed_steps.bits() - Tally.over(placed_steps, lambda symbols: symbols + 0x8000 >> 16).bits()
    return {
        "changed": hits.share({1}),
        "one_unit": steps.share({-1, 1}),
        "entropy_bytes": total / 8,
        "given_exponent": (which + how_far) / total,
    }


def numbers(tensor: RawTensor) -> Iterator[NDArray[np.int32]]:
    """Number the bfloat16 values in ascending order: equal to the bits of the magnitude, negative below zero.

    Yields:
        Blocks of at most 2^22 elements.
    """
    whole = tensor.data.view(np.uint16)
    for begin in range(0, len(whole), BLOCK):
        words = whole[begin : begin + BLOCK].astype(np.int32)
        yield np.where(words < 0x8000, words, 0x7FFF - words)


class Tally:
    """Counts of each symbol."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, symbols: NDArray[Any]) -> None:
        """Count integers of a small range."""
        if not len(symbols):
            return
        low, high = int(symbols.min()), int(symbols.max())
        if high - low > len(symbols):
            values, counts = np.unique(symbols, return_counts=True)
        else:
            counts = np.bincount(symbols - low if low else symbols)
            values = np.flatnonzero(counts)
            values, counts = values + low, counts[values]
        self._parts.append((values.astype(np.int64), counts))

    @classmethod
    def over(cls, other: "Tally", coarser: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> "Tally":
        """Count the images of another tally's symbols under `coarser`."""
        made = cls()
        made._parts = [(coarser(values), counts) for values, counts in other._parts]
        return made

    def bits(self) -> float:
        """Return the entropy of all symbols together, bits."""
        _, counts = self._merged()
        return float((counts * np.log2(counts.sum() / counts)).sum())

    def share(self, symbols: set[int]) -> float:
        """Return the fraction of these symbols."""
        values, counts = self._merged()
        return float(counts[np.isin(values, list(symbols))].sum() / max(1, counts.sum()))

    def _merged(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0)
        values, counts = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        symbols, places = np.unique(values, return_inverse=True)
        return symbols, np.bincount(places, counts)


def xor_zstd(codec: Any, base: Tensors, new: Tensors) -> list[bytes]:
    return [codec.compress(tensor.data ^ new[name].data, asbytes=True) for name, tensor in base.items()]


def undo_xor_zstd(codec: Any, base: Tensors, packed: Sequence[bytes]) -> list[NDArray[np.uint8]]:
    coded = zip(base.values(), packed, strict=True)
    return [np.frombuffer(codec.decompress(data, tensor.data.size), np.uint8) ^ tensor.data for tensor, data in coded]


def same(found: Tensors, expected: Tensors) -> bool:
    return all(np.array_equal(found[name].data, tensor.data) for name, tensor in expected.items())


# ------------------------------------------------------------------------------------------------- a real run


def reverse_text(directory: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Run the CPU recipe with published weights in bfloat16; return medians over pairs of successive versions."""
    shutil.rmtree(directory, ignore_errors=True)
    kept = directory / "kept"
    kept.mkdir(parents=True)
    paths = RunPaths((directory / "run").resolve())
    command = [str(Path(sys.executable).with_name("rl")), "@", str(ROOT / "configs/reverse_text/cpu.toml"), *settings]
    command += ["--trainer.weight-broadcast.dtype", "bfloat16", "--output-dir", str(paths.root)]
    with (directory / "rl.log").open("w") as log, keeping(paths, kept):
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    versions = [map_tensors(kept / f"step_{step}") for step in steps_in(kept)]
    pairs = [compare(base, new) for base, new in pairwise(versions)]
    keys = [key for key in pairs[0] if key != "exact"]
    return {
        **{key: median(pair[key] for pair in pairs) for key in keys},
        "exact": all(pair["exact"] for pair in pairs),
        "pairs": len(pairs),
        "worst": {"over_entropy": max(p["over_entropy"] for p in pairs),
                  "xor_over_delta": min(p["xor_over_delta"] for p in pairs)},
    }  # fmt: skip


@contextmanager
def keeping(paths: RunPaths, kept: Path) -> Iterator[None]:
    """Link every published version as it appears, because the run deletes it after the next switch."""
    done = threading.Event()

    def link_all() -> None:
        for step in steps_in(paths.weights_dir):
            if not (kept / f"step_{step}").exists():
                link(paths.weights(step), kept / f"step_{step}")

    def watch() -> None:
        while not done.wait(0.05):
            link_all()
        link_all()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def link(version: Path, target: Path) -> None:
    target.mkdir()
    try:
        os.link(version / "model.safetensors", target / "model.safetensors")
    except FileNotFoundError:  # deleted in the meantime
        target.rmdir()


# ---------------------------------------------------------------------------------------------------- the table

HEADER = (
    "| weights | changed | of these by one unit | bytes, % of full | over entropy | XOR + zstd over delta | "
    "encode, decode MB/s | XOR + zstd MB/s | exact |\n|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, figures: Mapping[str, Any]) -> str:
    """Format the figures of one pair as a row of the table."""
    cells = [
        name,
        f"{figures['changed']:.2%}",
        f"{figures['one_unit']:.0%}",
        f"{figures['delta_bytes'] / figures['full_bytes']:.2%}",
        f"{figures['over_entropy']:.3f}",
        f"{figures['xor_over_delta']:.2f}",
        f"{figures['encode_mb_s']:.0f}, {figures['decode_mb_s']:.0f}",
        f"{figures['xor_encode_mb_s']:.0f}, {figures['xor_decode_mb_s']:.0f}",
        "yes" if figures["exact"] else "NO",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
