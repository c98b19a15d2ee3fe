"""Makes the command `eval` start prime-rl's although verifiers installs a console script of the same name.

The installation order decides which of the two scripts exists. Every interpreter of the environment reads
`prime_rl_eval.pth` at its start, which calls `claim` if the script is named `eval`. The command of verifiers remains
available as `python -m verifiers.v1.cli.eval.main`.
"""

import os
import sys
import sysconfig
from pathlib import Path

MODULE = "prime_rl.entrypoints.eval"


def claim(script: str) -> None:
    """Replace this process by prime-rl's `eval` if `script` is the `eval` of another package in this environment."""
    path = Path(script)
    if not path.parent.samefile(sysconfig.get_path("scripts")) or MODULE in path.read_text(errors="replace"):
        return
    # -P: as for an installed script, the working directory is not on the import path.
    start = f"import sys; sys.argv[0] = {script!r}; from {MODULE} import main; main()"
    os.execv(sys.executable, [sys.executable, "-P", "-c", start, *sys.orig_argv[2:]])
