"""`rl` with small scripts in place of the three processes: python -m ...driver OUTPUT_DIR ROLES_JSON GRACE_S [KEYS].

Once started again, a role has "again" as its argument.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from prime_rl.configs import RLConfig
from prime_rl.errors import ERROR_FILE, run_main
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor import run as module
from prime_rl.supervisor.children import Role
from prime_rl.supervisor.supervise import Limits, supervise


def main():
    output_dir, roles = Path(sys.argv[1]), json.loads(sys.argv[2])
    paths = RunPaths(output_dir)

    def make_roles(config, paths):
        return [make_role(config, paths, name, script) for name, script in roles.items()]

    def make_role(config, paths, name, script):
        env = {ERROR_FILE: str(paths.error(name)), "METRICS": str(paths.metrics(name)), "RUN": str(paths.root)}
        role = Role(
            name=name,
            argv=[sys.executable, "-c", script],
            env={**os.environ, **env},
            log=paths.log(name),
            error=paths.error(name),
            finishes=name != "inference",
            last=name == "trainer",
            restarts=config.max_restarts,
            restarted=lambda: len(list(paths.root.glob(f"{name}.attempt_*"))),
            recalled=lambda: name == "orchestrator" and (paths.root / "undone").exists(),
        )
        return replace(role, again=lambda left: replace(role, argv=[*role.argv, "again", str(left)]))

    def supervise_sooner(roles, limits, events, lookout):
        return supervise(roles, Limits(limits.grace, kill=3, spread=0.5, straggle=2), events, lookout)

    module.make_roles = make_roles
    module.check_before_start = lambda config: None
    module.unreachable_servers = lambda config: []
    module.supervise = supervise_sooner
    keys = ["--output-dir", str(paths.root), "--max-steps", "3", "--grace-seconds", sys.argv[3], *sys.argv[4:]]
    run_main(lambda: sys.exit(module.run(RLConfig.load(keys))))


if __name__ == "__main__":
    main()
