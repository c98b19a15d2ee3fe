"""Whole runs with real processes under a real Slurm of four nodes, and their faults.

The first node has the server and the orchestrator, the others a rank of the trainer each.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from prime_rl.liveness.heartbeat_monitor import read_heartbeats
from prime_rl.storage.checkpoint_artifacts import find_checkpoints
from prime_rl.storage.paths import RunPaths
from tests.support import slurm
from tests.support.command import END_TIMEOUT_SECONDS, RUN_TIMEOUT_SECONDS, clean_environment, metrics_of, until

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed"),
]
STEPS, INTERVAL = 28, 4  # after 20 steps with two restarts, the reward has sometimes risen by 0.1 only
ARGUMENTS = (
    "@", "configs/reverse_text/cpu.toml", "--max-steps", str(STEPS), "--ckpt.interval", str(INTERVAL),
    "--orchestrator.batch-size", "256",
)  # fmt: skip
RESUME = ("--ckpt.resume-step", "-1")
COMPLETION = """
import json, sys, urllib.request
body = json.dumps({"model": "configs/reverse_text/model", "prompt": "ab", "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers), timeout=60).read().decode())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.start(tmp_path_factory.mktemp("slurm"), count=4, gpus=8) as running:
        yield running


@pytest.fixture(autouse=True)
def end_jobs(cluster: slurm.Slurm) -> Iterator[None]:
    """End the jobs of a failed test."""
    yield
    if jobs := cluster.jobs():
        cluster.run("scancel", *jobs)
        until(lambda: not cluster.jobs(), "the end of all jobs")


@dataclass
class Job:
    """A job of a run."""

    cluster: slurm.Slurm
    number: str
    paths: RunPaths

    @property
    def log(self) -> str:
        """The log of the job, with the output of all its processes."""
        file = self.paths.logs_dir / f"slurm-{self.number}.log"
        return file.read_text(errors="replace") if file.exists() else "no log"

    def until_checkpoint(self, step: int) -> None:
        """Wait for a checkpoint of a step, or of a later one."""
        until(lambda: max(find_checkpoints(self.paths.checkpoints_dir).steps, default=0) >= step, f"step {step}")

    def until_restarted(self, times: int) -> None:
        """Wait until a requeued job runs again."""
        self._until(lambda job: (job["JobState"], job["Restarts"]) == ("RUNNING", str(times)), "the requeued job")

    def until_ended(self, timeout_seconds: float = RUN_TIMEOUT_SECONDS) -> dict[str, str]:
        """Wait until the job is over."""
        self._until(lambda job: job["JobState"] in slurm.ENDED, "the end of the job", timeout_seconds)
        return self.cluster.job(self.number)

    def _until(
        self, holds: Callable[[dict[str, str]], bool], what: str, timeout_seconds: float = RUN_TIMEOUT_SECONDS
    ) -> None:
        """Wait; if the job is requeued, let it start at once."""
        try:
            until(lambda: holds(self.cluster.hurried_job(self.number)), what, timeout_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-6000:]}") from None


def submit(cluster: slurm.Slurm, output: Path, *arguments: str, nodes: int = 3) -> Job:
    """Submit a run with `rl --slurm`."""
    shape = ("--slurm.nodes", str(nodes), "--slurm.gpus-per-node", "0", "--trainer-ranks", "1")
    command = ("rl", *ARGUMENTS, "--output-dir", str(output), *shape, *arguments)
    done = cluster.run(*command, **environment(cluster))
    assert done.returncode == 0, done.stderr
    return Job(cluster, done.stdout.split()[2].rstrip(";"), RunPaths(output))


def environment(cluster: slurm.Slurm) -> dict[str, str]:
    """The variables of a shell in which the environment of the checkout is active."""
    folders = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    return {**clean_environment(), "PATH": folders, "VIRTUAL_ENV": sys.prefix}


def assert_complete(job: Job, ended: dict[str, str], restarts: int = 0) -> None:
    """Assert that the run has finished, without a lost or repeated step, and has learned."""
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), job.log
    for role in ("trainer", "orchestrator"):
        assert [row["step"] for row in metrics_of(job.paths, role)] == list(range(STEPS)), role
    rows = metrics_of(job.paths, "orchestrator")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05, rewards
    assert max(row["staleness/max"] for row in rows) == 2


@pytest.mark.release
def test_run_on_three_nodes_is_cancelled_and_resumed(cluster: slurm.Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    job.until_checkpoint(INTERVAL)
    cluster.run("scancel", job.number)
    assert job.until_ended()["JobState"] == "CANCELLED"
    job = submit(cluster, tmp_path, *RESUME)
    assert_complete(job, job.until_ended())
    ranks = {name: beat.host for name, beat in read_heartbeats(job.paths).items() if beat.role == "trainer"}
    assert ranks == {"trainer_0": "n2", "trainer_1": "n3"}
    assert "resumed from" in job.log
    until(cluster.are_idle, "idle nodes")
    until(lambda: not any(map(names_on, cluster.nodes.values())), "the end of all processes", END_TIMEOUT_SECONDS)


def test_run_is_requeued_by_a_user_and_by_the_loss_of_a_node(cluster: slurm.Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    job.until_checkpoint(INTERVAL)
    assert cluster.run("scontrol", "requeue", job.number).returncode == 0
    job.until_restarted(1)
    job.until_checkpoint(2 * INTERVAL)
    lost = cluster.nodes["n3"]
    lost.host.kill()
    ended = job.until_ended()
    assert "Node failure on n3" in job.log
    assert_complete(job, ended, restarts=2)
    lost.boot()
    lost.start_slurmd()
    until(cluster.are_idle, "the node to return")


def test_killed_rank_ends_the_job_and_sigterm_saves_a_checkpoint(cluster: slurm.Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    job.until_checkpoint(INTERVAL)
    rank_on(cluster.nodes["n3"]).kill()
    ended = job.until_ended()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    assert "error: rank 1 (pid " in job.log and "was killed by SIGKILL" in job.log
    # srun ends the other rank by SIGTERM, unless that has noticed the lost connection before.
    assert any(f"error: trainer ended with exit code {code}\n" in job.log for code in (1, 143)), job.log

    job = submit(cluster, tmp_path, *RESUME)
    until(lambda: len(metrics_of(job.paths, "trainer")) > 2 * INTERVAL, "a step after the second checkpoint")
    cluster.run("scancel", "--batch", "--signal", "TERM", job.number)
    ended = job.until_ended()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "143:0"), job.log
    trained = metrics_of(job.paths, "trainer")[-1]["step"] + 1
    assert find_checkpoints(job.paths.checkpoints_dir).steps[-1] == trained
    assert 2 * INTERVAL < trained < STEPS


def test_rl_on_the_nodes_of_a_job_restarts_after_a_killed_rank(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """`rl --nodes slurm` in a job, which starts all processes by srun."""
    paths = RunPaths(tmp_path)
    paths.logs_dir.mkdir()
    command = ("rl", *ARGUMENTS, "--output-dir", str(tmp_path), "--nodes", "slurm", "--max-restarts", "1")
    options = ("--nodes=3", "--ntasks-per-node=1", "--exclusive", f"--output={paths.logs_dir}/slurm-%j.log")
    wrapped = f"--wrap={shlex.join((*command, '--trainer-ranks', '1'))}"
    done = cluster.run("sbatch", "--parsable", *options, wrapped, **environment(cluster))
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip(), paths)
    job.until_checkpoint(INTERVAL)
    rank_on(cluster.nodes["n3"]).kill()
    assert_complete(job, job.until_ended())
    assert "resumed from" in (paths.logs_dir / "trainer.log").read_text()


@pytest.mark.release
def test_sft_on_two_nodes_is_requeued(cluster: slurm.Slurm, tmp_path: Path) -> None:
    paths, data = RunPaths(tmp_path / "run"), tmp_path / "examples.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}: ", "completion": str(n)}) + "\n" for n in range(200)))
    paths.logs_dir.mkdir(parents=True)
    script = str(Path(__file__).parents[3] / "deploy" / "slurm" / "sft.sbatch")
    steps = ("--max-steps", "100", "--ckpt.interval", "20")
    recipe = ("configs/reverse_text/sft_cpu.toml", "--data.name", str(data), *steps)
    variables = {**environment(cluster), "OUTPUT_DIR": str(paths.root), "GPUS": "1"}
    options = ("--parsable", "--nodes=2", f"--output={paths.logs_dir}/slurm-%j.log")
    done = cluster.run("sbatch", *options, script, *recipe, **variables)
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip(), paths)
    job.until_checkpoint(20)
    assert cluster.run("scontrol", "requeue", job.number).returncode == 0
    ended = job.until_ended()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), job.log
    assert [row["step"] for row in metrics_of(paths, "trainer")] == list(range(100))


def test_server_over_two_nodes_answers_and_ends_with_one_of_its_engines(cluster: slurm.Slurm, tmp_path: Path) -> None:
    log, script = tmp_path / "log", str(Path(__file__).parents[3] / "deploy" / "slurm" / "inference.sbatch")
    variables = {**environment(cluster), "INFERENCE_SERVER_API_KEY": "key", "GPUS": "1"}
    options = ("--parsable", "--nodes=2", f"--output={log}")
    done = cluster.run("sbatch", *options, script, "configs/inference/debug.toml", **variables)
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip(), RunPaths(tmp_path))
    until(lambda: log.exists() and " serving configs/reverse_text/model on port 8000" in log.read_text(), "the server")
    head, other = cluster.run("scontrol", "show", "hostnames", nodes_of(job)).stdout.split()
    ask = (sys.executable, "-c", COMPLETION, f"http://{head}:8000/v1/completions")
    until(lambda: '"text":"' in cluster.run(*ask).stdout, "an answer")
    processes = cluster.nodes[other].processes()
    # By its parent: whether vLLM can set its title depends on the environment.
    servers = {one.pid for one in processes if one.info["name"] == "inference"}
    engines = [one for one in processes if one.ppid() in servers]
    assert len(engines) == 1, f"{[one.info for one in processes]} on {other}:\n{log.read_text()[-8000:]}"
    engines[0].kill()
    assert job.until_ended()["JobState"] == "FAILED"
    assert f"error: node {other} (data-parallel ranks 1): EngineCore_DP1 (pid " in log.read_text()
    until(lambda: not names_on(cluster.nodes[head]), "the end of the server")


def test_run_of_lost_nodes_ends_when_the_requeued_job_resumes_it(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """Slurm loses two nodes, on which the whole run continues: server, orchestrator, trainer and the job's script.

    It is the last test: Slurm 22.05 gives these nodes no other exclusive job after they have returned.
    """
    job = submit(cluster, tmp_path, "--max-steps", "2000", nodes=2)
    job.until_checkpoint(INTERVAL)
    lost = [cluster.nodes[name] for name in cluster.run("scontrol", "show", "hostnames", nodes_of(job)).stdout.split()]
    for node in lost:
        node.kill_slurmd()
    job.until_restarted(1)
    ledger = job.paths.ledger(1)
    until(ledger.exists, "the orchestrator of the second start")
    number = len(metrics_of(job.paths, "trainer"))
    until(lambda: len(metrics_of(job.paths, "trainer")) > number + 2 * INTERVAL, "steps of the second start")
    for role in ("trainer", "orchestrator"):
        steps = [row["step"] for row in metrics_of(job.paths, role)]
        assert steps == list(range(len(steps))), role
    what = f"error: {tmp_path} was taken over by start {job.number}.1; this process (start {job.number}.0) exits"
    for pattern in ("inference_*.log", "orchestrator.log", f"torchrun/{job.number}.0_*/attempt_0/0/stderr.log"):
        assert any(what in log.read_text() for log in job.paths.logs_dir.glob(pattern)), pattern
    for node in lost:
        until(lambda node=node: not names_on(node), "the end of all processes of the first start")
    assert cluster.job(job.number)["JobState"] == "RUNNING", job.log
    for node in lost:
        node.start_slurmd()
    cluster.run("scancel", job.number)
    until(cluster.are_idle, "the nodes to return")


def names_on(node: slurm.Node) -> list[str]:
    """Return the names of the processes of runs on a node."""
    others = ("bash", "sleep", "slurm", "srun")
    return [name for process in node.processes() if not (name := process.info["name"]).startswith(others)]


def rank_on(node: slurm.Node) -> psutil.Process:
    """Return the rank of the trainer that runs on a node."""
    programs = {"src/prime_rl/trainer/rl/train.py", "prime_rl.trainer.rl.train"}
    [rank] = [process for process in node.processes() if programs & {*(process.info["cmdline"] or ())[2:4]}]
    return rank


def nodes_of(job: Job) -> str:
    """Return the nodes of a job as Slurm lists them."""
    return job.cluster.job(job.number)["NodeList"]
