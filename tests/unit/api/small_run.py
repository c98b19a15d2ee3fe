"""`rl` over three scripts instead of its processes, chosen by the variable SMALL_RUN; started as a child of a test."""

import os
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from prime_rl.configs.rl import RLConfig
from prime_rl.core.entry_point import ERROR_FILE, run_main
from prime_rl.supervisor import launch
from prime_rl.supervisor.child_processes import ProcessSpec
from prime_rl.supervisor.supervisor import SupervisorTimeouts

FOREVER = "import time; time.sleep(600)"
STEPS = """
import itertools, json, os, pathlib, time
path = pathlib.Path(os.environ["METRICS"]); path.parent.mkdir(parents=True, exist_ok=True)
for step in itertools.count() if NUM is None else range(NUM):
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": step / 10, "staleness/max": min(step, 2)}) + "\\n")
    time.sleep(0.05)
"""
BAD = (
    "from prime_rl.core.entry_point import run_main\n"
    "from prime_rl.core.errors import ConfigError\n"
    "def main(): raise ConfigError('trainer.optim.lr = -1 is negative')\n"
    "run_main(main)"
)
RUNS = {
    "three": {"inference": FOREVER, "orchestrator": STEPS.replace("NUM", "3"), "trainer": STEPS.replace("NUM", "3")},
    "endless": {"inference": FOREVER} | dict.fromkeys(("orchestrator", "trainer"), STEPS.replace("NUM", "None")),
    "failing": {"inference": FOREVER, "orchestrator": STEPS.replace("NUM", "9"), "trainer": "import sys; sys.exit(3)"},
    "bad_input": {"inference": FOREVER, "orchestrator": FOREVER, "trainer": BAD},
}


def make_specs(config, paths):
    """The specs of the scripts."""
    specs = []
    for name, script in RUNS[os.environ["SMALL_RUN"]].items():
        env = {**os.environ, ERROR_FILE: str(paths.error(name)), "METRICS": str(paths.metrics(name))}
        spec = ProcessSpec(name, [sys.executable, "-c", script], env, paths.log(name), paths.error(name))
        specs.append(replace(spec, must_finish=name != "inference", is_last=name == "trainer"))
    return specs


def main():
    """Run what `rl` runs, with these specs."""
    launch.make_process_specs = make_specs
    launch.check_before_start = launch.check_on_hub = lambda *_: None
    launch.SupervisorTimeouts = partial(SupervisorTimeouts, culprit_seconds=0.5)
    accept_all = SimpleNamespace(run=lambda config: 0)
    run_main(lambda: sys.exit(launch.run(RLConfig.load(), accept_all, keep_serving=True)))
