"""GPUs: peak rates and sizes from the vendors' data sheets, and the machines that they are usually in."""

import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace

from prime_rl.core.errors import ConfigError

GIB = 1024**3
NODE = 8
"""GPUs of a node."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        name: as in `--gpus 8xNAME`.
        flops: dense bfloat16 FLOP/s, with sums in float32.
        memory: GiB that the driver reports.
        bandwidth: bytes/s of its memory.
        attention: share of `flops` that the fastest attention kernel of the trainer reaches in long sequences.
        link: bytes/s to another GPU of the node, in each direction.
        network: bytes/s to another node, for each GPU.
        host: bytes/s to and from host memory.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    attention: float
    link: float
    network: float
    host: float


_HOPPER = {"attention": 0.56, "link": 450e9, "network": 50e9, "host": 50e9}
_AMPERE = {"attention": 0.65, "link": 300e9, "network": 25e9, "host": 25e9}
_PCIE = {"attention": 0.65, "link": 12e9, "network": 3e9, "host": 25e9}
_TABLE = (
    Gpu("RTX3090", 71e12, 24.0, 936e9, **_PCIE),
    Gpu("RTX4090", 165.2e12, 24.0, 1008e9, **_PCIE),
    Gpu("RTX5090", 209.5e12, 31.8, 1792e9, **_PCIE),
    Gpu("A6000", 154.8e12, 48.0, 768e9, **_PCIE),
    Gpu("L40S", 362e12, 45.0, 864e9, **_PCIE),
    Gpu("A100-40", 312e12, 39.6, 1555e9, **_AMPERE),
    Gpu("A100", 312e12, 79.3, 2039e9, **_AMPERE),
    Gpu("H100", 989e12, 79.6, 3350e9, **_HOPPER),
    Gpu("H200", 989e12, 140.4, 4800e9, **_HOPPER),
    # FlashAttention-2 does not use Blackwell's matrix units.
    Gpu("B200", 2250e12, 178.4, 8000e9, **{**_HOPPER, "attention": 0.133, "link": 900e9}),
    Gpu("MI300X", 1307e12, 192.0, 5300e9, **{**_HOPPER, "attention": 0.3}),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}
FA2_ON_HOPPER = 0.36
"""Share of the peak that FlashAttention-2 reaches where FlashAttention-3 reaches `Gpu.attention`."""


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Return the number and the kind of `8xH100`, `H100` or `512xb200`. Raises ConfigError."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,5}) ?x ?)?([a-z][a-z0-9-]+)", text.strip(), re.IGNORECASE | re.ASCII)
    gpu = GPUS.get(match[2].upper()) if match else None
    if match is None or gpu is None:
        raise ConfigError(f"--gpus {text}: use a number and a GPU, such as 8xH100; known GPUs: {', '.join(GPUS)}")
    return int(match[1] or 1), gpu


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu | None:
    """Return the GPU that a driver calls `name`, with the given size; None if it is unknown."""
    plain = re.sub(r"[^A-Z0-9]", "", name.upper())
    # The longest name first: A100-40 contains A100.
    for gpu in sorted(_TABLE, key=lambda gpu: -len(gpu.name)):
        if re.sub(r"[^A-Z0-9]", "", gpu.name) in plain:
            return gpu if memory_gib is None else replace(gpu, memory=memory_gib)
    return None


def detect_gpu() -> Gpu | None:
    """Return the kind and size of this machine's first GPU, by nvidia-smi; None without one that is known."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    if shutil.which(query[0]) is not None:
        with suppress(OSError, subprocess.SubprocessError, ValueError):  # a driver without a device
            output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            name, _, size = output.strip().partition(",")
            return find_gpu(name, int(size) / 1024)
    return None
