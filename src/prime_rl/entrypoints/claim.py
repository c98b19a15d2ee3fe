"""`eval` is ours, whichever package was installed last.

verifiers, which we need, installs a console script `eval` of its own: two files with one path, and the installer's
order decides which is there (uv's is a race, and a later `uv pip install verifiers` always overwrites ours). So
`prime_rl_eval.pth`, which every interpreter of the environment reads at its start, looks whether the script being run
is called `eval` and then calls `claim`. verifiers' own stays at hand as `python -m verifiers.v1.cli.eval.main`.
"""

import os
import sys
import sysconfig
from pathlib import Path

MODULE = "prime_rl.entrypoints.eval"


def claim(script: str) -> None:
    """Replace this process by our command if `script` is another package's `eval` in the environment's own scripts.

    Anybody's `eval` elsewhere is left alone, and so is one that already runs ours.
    """
    path = Path(script)
    if not path.parent.samefile(sysconfig.get_path("scripts")) or MODULE in path.read_text(errors="replace"):
        return
    # -P: as with an installed script, the working directory is no place to import from.
    start = f"import sys; sys.argv[0] = {script!r}; from {MODULE} import main; main()"
    os.execv(sys.executable, [sys.executable, "-P", "-c", start, *sys.orig_argv[2:]])
