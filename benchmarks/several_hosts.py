"""Runs the CPU recipe on five hosts: two of inference, two of the trainer, one of the orchestrator.

    sudo .venv/bin/python benchmarks/several_hosts.py --directory relay --json FILE
    sudo .venv/bin/python benchmarks/several_hosts.py --directory relay --cut inference1 --at 10 --seconds 20
    sudo .venv/bin/python benchmarks/several_hosts.py --directory relay --kill trainer2 --at 10

The hosts are namespaces with their own addresses, names and process ids (`tests/support/network_hosts.py`). With
`--directory shared` all processes use one run directory. With `relay` the trainer's hosts share one, the orchestrator
has its own, and the servers have none: everything else passes through two relays. With `separate` each of the trainer's
hosts has its own as well, and there is a third relay.

The result has: `steps`; `reward_first`, `reward_last`, means over five steps; `staleness_max`; `seconds` from the start
of the processes to the end of the last one; `exit_codes`; with a fault, `named`: the lines of the logs that name the
host, and `bytes`: received by each host.
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.command import clean_environment, metrics_of
from tests.support.network_hosts import NetworkHost, network_hosts

from prime_rl.storage.paths import RunPaths

ROOT = Path(__file__).parents[1]
NAMES = ("inference1", "inference2", "trainer1", "trainer2", "orchestrator")
_RELAY_PORT, _SERVER_PORT, _MASTER_PORT = 8430, 8000, 29500
_POLL_SECONDS = 0.2


def configurations(hosts: dict[str, NetworkHost], root: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The configuration of each command: that of configs/reverse_text/cpu.toml, in parts."""
    uses_relay = options.directory != "shared"
    model = str(ROOT / "configs/reverse_text/model")
    limits = {"warn_after_seconds": 5, "dead_after_seconds": options.dead}
    common = {"max_steps": options.steps, "async_level": 2, "heartbeat": limits, "wait_timeout_seconds": 300}
    trainer_dir, orchestrator_dir = directories(root, uses_relay)
    servers = [f"http://{hosts[name].address}:{_SERVER_PORT}/v1" for name in NAMES[:2]]
    relays = [f"http://{hosts[name].address}:{_RELAY_PORT}" for name in ("orchestrator", "trainer1")]
    trainer = {
        **common, "output_dir": str(trainer_dir), "num_minibatches": 4, "loss": {"ratio_clip": 3.0},
        "nodes_share_directory": options.directory != "separate",
        "model": {"name": model, "seq_len": 4096}, "optim": {"lr": 4e-4, "beta2": 0.95, "weight_decay": 0.0},
        "scheduler": {"type": "linear", "warmup_steps": 5, "decay_steps": 50, "min_lr": 3e-5},
        "dist_timeout_seconds": options.dead, **({"weight_broadcast": {"delta": {}}} if options.delta else {}),
    }  # fmt: skip
    orchestrator = {
        **common, "output_dir": str(orchestrator_dir), "model": {"name": model}, "seq_len": 512,
        "batch_size": options.batch_size, "rollouts_per_example": 8, "sampling": {"max_tokens": 8},
        "env": [{"id": "reverse_text", "args": {"words": 20000, "min_letters": 3, "max_letters": 4}}],
        "client": {"base_url": servers, "reconnect_seconds": options.dead, "probe_timeout_seconds": 3},
    }  # fmt: skip
    inference = {"model": {"name": model, "max_model_len": 512}, "server": {"host": "0.0.0.0", "port": _SERVER_PORT}}
    if uses_relay:
        inference |= {"relay": {"urls": relays}}
    return {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}


def directories(root: Path, uses_relay: bool) -> tuple[Path, Path]:
    """The run directories of trainer and orchestrator."""
    return (root / "trainer", root / "orchestrator") if uses_relay else (root / "run", root / "run")


def start_all(hosts: dict[str, NetworkHost], root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start all processes; return those of trainer and orchestrator."""
    uses_relay = options.directory != "shared"
    trainer_dir, orchestrator_dir = directories(root, uses_relay)
    trainer_dirs = {"trainer1": trainer_dir, "trainer2": trainer_dir}
    if options.directory == "separate":
        trainer_dirs["trainer2"] = root / "trainer2"
    key = {"INFERENCE_SERVER_API_KEY": secrets.token_hex(16), "RELAY_API_KEY": secrets.token_hex(16)}
    environment = clean_environment() | key
    files = {}
    for name, values in configurations(hosts, root, options).items():
        files[name] = root / f"{name}.toml"
        files[name].write_text(tomli_w.dumps(values))

    def start(host: str, module: str, *arguments: str) -> Any:
        log = root / f"{host}-{module.rpartition('.')[2]}.log"
        return hosts[host].start([sys.executable, "-m", module, *arguments], log, environment)

    if uses_relay:
        relays = {directory: host for host, directory in reversed(trainer_dirs.items())}  # one for each directory
        for host, directory, source, writer in (
            *((host, directory, "orchestrator", "--orchestrator") for directory, host in relays.items()),
            ("orchestrator", orchestrator_dir, "trainer1", "--trainer"),
        ):
            url = f"http://{hosts[source].address}:{_RELAY_PORT}"
            start(host, "prime_rl_relay", str(directory), "--host", hosts[host].address, writer, url)
    for number, name in enumerate(NAMES[:2]):
        cache = ("--weights_cache", str(root / f"cache{number}"))
        start(name, "prime_rl.entrypoints.inference", "@", str(files["inference"]), *cache)
    started = {}
    for rank, name in enumerate(NAMES[2:4]):
        started[name] = start(
            name, "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1",
            "--master-addr", hosts["trainer1"].address, "--master-port", str(_MASTER_PORT), "-m",
            "prime_rl.trainer.rl.train", "@", str(files["trainer"]), "--output-dir", str(trainer_dirs[name]),
        )  # fmt: skip
    file = str(files["orchestrator"])
    started["orchestrator"] = start("orchestrator", "prime_rl.entrypoints.orchestrator", "@", file)
    return started


def run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the recipe, with the fault that `options` name, and return the result."""
    trainer, paths = map(RunPaths, directories(root, options.directory != "shared"))
    with network_hosts(NAMES) as made:
        hosts = {host.name: host for host in made}
        for host in made if options.rate else ():
            host.limit_rate(options.rate)
        begin, due = time.monotonic(), float("inf")
        started = start_all(hosts, root, options)
        victim = hosts.get(options.cut or options.kill or "")
        fault_at = None
        while any(process.poll() is None for process in started.values()):
            steps = len(metrics_of(trainer, "trainer"))
            if victim is not None and fault_at is None and steps >= options.at:
                fault_at, due = time.monotonic(), time.monotonic() + options.seconds
                (victim.cut if options.cut else victim.kill)()
            if victim is not None and time.monotonic() > due:
                due = float("inf")
                if options.cut:
                    victim.reconnect()
            if time.monotonic() - begin > options.timeout:
                break
            time.sleep(_POLL_SECONDS)
        end = time.monotonic()
        result = {
            "seconds": round(end - begin, 1),
            "seconds_after_fault": None if fault_at is None else round(end - fault_at, 1),
            "exit_codes": {name: process.poll() for name, process in started.items()},
            "megabytes": {host.name: round(host.bytes_received() / 1e6, 1) for host in made},
        }
    return result | summary(paths, root, victim)


def summary(paths: RunPaths, root: Path, victim: NetworkHost | None) -> dict[str, Any]:
    """What metrics and logs contain; `named` are the warnings and errors that name the host with the fault."""
    rows = metrics_of(paths, "orchestrator")
    rewards = [row["reward/mean"] for row in rows]
    logs = [line for log in sorted(root.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    who = () if victim is None else (f"on {victim.name}", f"from {victim.name}", victim.address)
    names = who and (*who, f"of the {victim.name.rstrip('12')}")
    return {
        "steps": len(rows),
        "reward_first": round(sum(rewards[:5]) / max(1, len(rewards[:5])), 3),
        "reward_last": round(sum(rewards[-5:]) / max(1, len(rewards[-5:])), 3),
        "staleness_max": max((row["staleness/max"] for row in rows), default=None),
        "named": [
            line[:500]
            for line in logs
            if any(name in line for name in names) and any(kind in line for kind in ("WARNING", "error:", "INFO"))
        ],
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", choices=("shared", "relay", "separate"), default="relay", help="what connects the hosts"
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--batch-size", type=int, default=1024, help="rollouts of a batch")
    parser.add_argument("--delta", action="store_true", help="publish differences")
    parser.add_argument("--rate", type=float, help="limit of each host in MB/s")
    parser.add_argument("--cut", choices=NAMES, help="host that loses its network")
    parser.add_argument("--kill", choices=NAMES, help="host that loses its power")
    parser.add_argument("--at", type=int, default=10, help="the fault comes after so many steps")
    parser.add_argument("--seconds", type=float, default=20, help="length of --cut")
    parser.add_argument("--dead", type=float, default=60, help="heartbeat.dead_after_seconds and similar limits")
    parser.add_argument("--timeout", type=float, default=900, help="longest time of the run")
    parser.add_argument("--keep", type=Path, help="directory for all files of the run; by default they are deleted")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args(argv)


def main() -> None:
    """Run, print and save the result."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="several_hosts-") as temporary:
        root = options.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        result = run(root, options)
    chosen = {key: value for key, value in vars(options).items() if key not in ("keep", "json")}
    text = json.dumps({"options": chosen, **result}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
