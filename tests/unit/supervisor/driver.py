"""`rl` with small scripts in place of the three processes: python -m ...driver OUTPUT_DIR ROLES_JSON [GRACE_S]."""

import functools
import json
import os
import sys
from pathlib import Path

from prime_rl.configs import RLConfig
from prime_rl.errors import ERROR_FILE, run_main
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor import run as module
from prime_rl.supervisor.children import Role
from prime_rl.supervisor.supervise import Limits, supervise


def main():
    output_dir, roles, grace = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
    paths = RunPaths(output_dir)

    def make_roles(config, paths):
        return [
            Role(
                name=name,
                argv=[sys.executable, "-c", script],
                env={**os.environ, ERROR_FILE: str(paths.error(name)), "METRICS": str(paths.metrics(name))},
                log=paths.log(name),
                error=paths.error(name),
                finishes=name != "inference",
                last=name == "trainer",
            )
            for name, script in roles.items()
        ]

    module.make_roles = make_roles
    module.check_before_start = lambda config: None
    module.unreachable_servers = lambda config: []
    module.supervise = functools.partial(supervise, limits=Limits(grace=grace, kill=3, spread=0.5, straggle=2))
    run_main(lambda: sys.exit(module.run(RLConfig.load(["--output-dir", str(paths.root), "--max-steps", "3"]))))


if __name__ == "__main__":
    main()
