"""`rl` over small scripts: python -m ...driver OUTPUT_DIR ROLES_JSON TIMEOUTS_JSON [KEYS].

A role is a script. A restarted script has the argument "again". TIMEOUTS are fields of `SupervisorTimeouts`.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from prime_rl.configs.rl import RLConfig
from prime_rl.core.entry_point import ERROR_FILE, run_main
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor import launch as module
from prime_rl.supervisor.child_processes import ProcessSpec
from prime_rl.supervisor.supervisor import supervise


def main():
    output_dir, roles, given = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    paths = RunPaths(output_dir)

    def make_specs(config, paths):
        return [make_role(config, paths, name, script) for name, script in roles.items()]

    def make_role(config, paths, name, script):
        env = {ERROR_FILE: str(paths.error(name)), "METRICS": str(paths.metrics(name)), "RUN": str(paths.root)}
        role = ProcessSpec(
            name=name,
            argv=[sys.executable, "-c", script],
            env={**os.environ, **env},
            log=paths.log(name),
            error=paths.error(name),
            must_finish=name != "inference",
            is_last=name == "trainer",
            max_restarts=config.max_restarts,
        )
        return replace(role, restart_spec=lambda left: replace(role, argv=[*role.argv, "again", str(left)]))

    def supervise_sooner(specs, timeouts, events, health, keep_serving):
        # Long where a correct run needs less, so that no slow machine reaches them.
        chosen = {"stop_seconds": 1.0, "kill_seconds": 600.0, "culprit_seconds": 0.5, "exit_seconds": 600.0} | given
        return supervise(specs, replace(timeouts, **chosen), events, health, keep_serving)

    module.make_process_specs = make_specs
    module.check_before_start = module.check_on_hub = lambda *_: None
    module.unreachable_servers = lambda config: []
    module.supervise = supervise_sooner
    keys = ["--output-dir", str(paths.root), "--max-steps", "3", *sys.argv[4:]]
    run_main(lambda: sys.exit(module.run(RLConfig.load(keys), SimpleNamespace(run=lambda config: 0))))


if __name__ == "__main__":
    main()
