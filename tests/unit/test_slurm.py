"""deploy/slurm/rl.sbatch under a real Slurm with namespaces of this machine as nodes. `uv` is a script that records."""

import time
from pathlib import Path

import pytest

from tests.support import slurm

pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())]
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "rl.sbatch"
# Records its node and arguments, then runs the command in the variable DO_<name>.
UV = """\
#!/usr/bin/env bash
shift
name=$1
[[ $name != inference ]] || name=inference_$SLURMD_NODENAME
[[ $name != python ]] || name=torchrun
printf '%s %s %s\\n' "$name" "$SLURMD_NODENAME" "$*" >> "$OUTPUT_DIR/calls" # in one write
[[ $INFERENCE_SERVER_API_KEY ]] || exit 9
echo "$name ${CUDA_VISIBLE_DEVICES:-none} ${SLURM_STEP_GPUS:-none}" >> "$OUTPUT_DIR/gpus"
until (($(wc -l < "$OUTPUT_DIR/calls") >= STARTED)); do sleep 0.05; done
variable=DO_$name
eval "${!variable:-sleep 300}"
"""
SAVE = (
    "trap 'echo saved >> $OUTPUT_DIR/saved; exit 0' TERM; echo ${SLURM_RESTART_COUNT:-0} >> $OUTPUT_DIR/ready;"
    " sleep 300 & wait"
)
# Fails at its first question about a job, or its first signal, as a command does after its timeout.
BUSY = """\
#!/usr/bin/env bash
name=${0##*/}
if [[ $2 != hostnames ]] && mkdir "$OUTPUT_DIR/$name" 2> /dev/null; then echo "$name: Slurm is busy" >&2; exit 1; fi
PATH=${PATH#*:} exec "$name" "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.start(tmp_path_factory.mktemp("slurm"), count=4, gpus=8) as running:
        yield running


def put_uv(folder):
    folder.chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text(UV)
    (folder / "bin" / "uv").chmod(0o755)
    return folder / "bin"


@pytest.fixture
def job(cluster, tmp_path):
    """Submit the script: `job(servers, started, orchestrator="exit 0", ...)`; returns exit code, log, calls."""
    programs, target, output = put_uv(tmp_path), tmp_path / "target", tmp_path / "link"
    target.mkdir()
    output.symlink_to(target)
    log = tmp_path / "log"

    def submit(nodes=4, servers=1, end_when=None, sbatch=(), grace=100, **behaviours):
        variables = {f"DO_{name}": command for name, command in behaviours.items()}
        given = {
            "PATH": f"{programs}:{cluster.environment['PATH']}",
            "OUTPUT_DIR": str(output), "INFERENCE": "i.toml", "ORCHESTRATOR": "o.toml", "TRAINER": "t.toml",
            "STARTED": str(nodes + 1), "GRACE_SECONDS": str(grace), **variables,
        }  # fmt: skip
        options = [f"--nodes={nodes}", f"--output={log}", f"--export=ALL,INFERENCE_NODES={servers}", *sbatch]
        submitted = cluster.run("sbatch", "--parsable", *options, str(SCRIPT), **given)
        assert submitted.returncode == 0, submitted.stderr
        number = submitted.stdout.strip()
        if end_when is not None:
            wait_until(lambda: end_when(output), log)
            ask_to_end(cluster, number, log)
        state = {}

        def is_over():
            state.update(cluster.job(number))
            return state["JobState"] in slurm.ENDED

        wait_until(is_over, log)
        calls = [line.split(" ", 2) for line in lines_of(output / "calls")]
        return int(state["ExitCode"].split(":")[0]), log.read_text(), calls, output

    return submit


def wait_until(holds, log, within=240):
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)


def test_slurm_job_starts_one_torchrun_per_trainer_node_and_stops_servers(job):
    """One server saves before it exits, the other ignores SIGTERM and is killed; sbatch is given other task counts."""
    code, log, calls, output = job(
        servers=2, inference_n1=SAVE, inference_n2="trap '' TERM; while :; do sleep 0.2; done", grace=12,
        orchestrator="until [[ -s $OUTPUT_DIR/ready ]]; do sleep 0.1; done", torchrun="exit 0",
        sbatch=["--ntasks=8", "--ntasks-per-node=2", "--exclusive"],
    )  # fmt: skip
    assert code == 0, log
    started = sorted((name, node) for name, node, _ in calls)
    servers = [("inference_n1", "n1"), ("inference_n2", "n2")]
    assert started == [*servers, ("orchestrator", "n1"), ("torchrun", "n3"), ("torchrun", "n4")]
    words = {name: command for name, _, command in calls}
    assert "--client.base-url http://n1:8000/v1,http://n2:8000/v1" in words["orchestrator"]
    assert "--nnodes 2 --nproc-per-node 8" in words["torchrun"]
    assert "--rdzv-endpoint n3:29400" in words["torchrun"]
    assert (output / "saved").read_text() == "saved\n"


@pytest.mark.parametrize("busy", [False, True])
def test_slurm_job_sigterm_of_the_batch_script_stops_all(job, tmp_path, busy):
    """As two minutes before its time limit, or by `scancel --batch --signal TERM`; a busy Slurm answers later."""
    if busy:
        for name in ("scontrol", "scancel"):
            (tmp_path / "bin" / name).write_text(BUSY)
            (tmp_path / "bin" / name).chmod(0o755)
    saving = dict.fromkeys(("inference_n1", "orchestrator", "torchrun"), SAVE)
    code, log, _, output = job(nodes=2, end_when=lambda output: len(lines_of(output / "ready")) == 3, **saving)
    assert code == 143, log
    assert (output / "saved").read_text() == "saved\n" * 3, log
    assert log.count("is busy") == 2 * busy


def test_one_node_job_resumes_when_it_is_requeued_and_passes_sigterm_on(cluster, tmp_path):
    put_uv(tmp_path)
    log, calls = tmp_path / "log", tmp_path / "calls"
    given = {
        "PATH": f"{tmp_path}/bin:{cluster.environment['PATH']}", "OUTPUT_DIR": str(tmp_path), "STARTED": "1",
        "INFERENCE_SERVER_API_KEY": "key", "DO_rl": SAVE,
    }  # fmt: skip
    script = SCRIPT.with_name("one_node.sbatch")
    submitted = cluster.run("sbatch", "--parsable", f"--output={log}", str(script), "rl.toml", "--ckpt", **given)
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.strip()
    wait_until(lambda: lines_of(tmp_path / "ready"), log)

    def is_requeued():
        # A busy Slurm may carry out what it does not confirm in time, and refuses the second attempt.
        done = cluster.run("scontrol", "requeue", number).returncode == 0
        return done or int(cluster.job(number)["Restarts"]) > 0

    def has_restarted():
        """Let it start at once instead of after two minutes."""
        assert cluster.hurried_job(number)["JobState"] != "FAILED", log.read_text()
        return "1" in lines_of(tmp_path / "ready")

    wait_until(is_requeued, log)
    wait_until(has_restarted, log)
    commands = [line.split(" ", 2)[2] for line in lines_of(calls)]
    assert commands == ["rl @ rl.toml --ckpt", "rl @ rl.toml --ckpt --ckpt.resume-step -1"]
    before = lines_of(tmp_path / "saved")
    ask_to_end(cluster, number, log)
    wait_until(lambda: cluster.job(number)["JobState"] in slurm.ENDED, log)
    assert lines_of(tmp_path / "saved") == [*before, "saved"]


def lines_of(file):
    return file.read_text().splitlines() if file.exists() else []


def ask_to_end(cluster, number, log):
    """Send SIGTERM to the script of a job, again if a busy Slurm does not confirm it in time."""

    def is_asked():
        done = cluster.run("scancel", "--batch", "--signal", "TERM", number).returncode == 0
        return done or cluster.job(number)["JobState"] in slurm.ENDED

    wait_until(is_asked, log)
