"""`doctor` on made-up directories; tests/integration/rl/test_doctor.py diagnoses real runs."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.entry_point import ERROR_FILE, write_error_file
from prime_rl.entrypoints import doctor
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors import Monitor
from prime_rl.monitors.bottleneck import SpeedSettings, speed_settings
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.doctor import diagnosis
from prime_rl.supervisor.doctor.collect import read_facts, read_run_config, read_settings
from prime_rl_page.run_data.run_view import pass_threshold

PROCESS = """
import sys, time
from pathlib import Path
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
name, waits, root = sys.argv[1:]
heart = HeartbeatWriter(RunPaths(Path(root)), name, name.partition("_")[0], 0.1)
heart.start()
heart.enter("wait", 600.0, waits or None)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "run [1]")
    write_config(RLConfig.load(["--max-steps", "60", "--ckpt", "--output-dir", str(paths.root)]), paths.run_toml)
    return paths


@pytest.fixture
def quick(monkeypatch):
    """Observe twenty times as often."""
    monkeypatch.setattr(diagnosis, "_OBSERVE_INTERVAL_SECONDS", 0.05)


def run(capsys, *argv):
    code = doctor._main([str(word) for word in argv])
    return code, capsys.readouterr()


def test_doctor_without_a_run_prints_one_line_and_exits_with_2(tmp_path, capsys):
    for directory in (tmp_path, tmp_path / "none"):
        code, output = run(capsys, directory)
        assert (code, output.out) == (2, "")
        assert output.err == f"error: {directory} contains no run; pass the output_dir of a run\n"


def test_read_facts_reads_metrics_events_and_versions(paths):
    paths.metrics_dir.mkdir()
    validation = '{"step": 12, "val/loss": 1.0, "time/val": 1.0}\n'
    paths.metrics("trainer").write_text(
        '{"step": 10, "time/step": 1.5}\n{"step": 11, "time/step": 1.25}\n' + validation + '{"st'
    )
    evaluation = '{"step": 13, "eval/time": 1.0}\n'
    paths.metrics("orchestrator").write_text(f'not json\n{{"step": 12, "reward/mean": 0.5}}\n{evaluation}')
    paths.events.write_text('{"time": 1, "event": "started", "name": "trainer", "pid": 5}\n')
    for step in (11, 12):
        paths.weights(step).mkdir(parents=True)
        (paths.weights(step) / "model.safetensors").write_bytes(bytes(1000 * step))
    (paths.checkpoints_dir / "step_30.tmp").mkdir(parents=True)
    paths.logs_dir.mkdir()
    paths.error("trainer").write_text('{"code": 1, "message": "the loss is not finite"}')
    paths.error("inference").write_text("half")
    facts = read_facts(paths, (), time.time(), 0.0)
    assert (facts.trained["step"], facts.shipped["step"], facts.version) == (11, 12, 12)
    assert [event["event"] for event in facts.events] == ["started"]
    assert facts.errors == {"trainer": "the loss is not finite"}
    assert facts.broken.keys() == {"step_30.tmp"}
    assert (facts.settings.max_steps, facts.settings.ckpt, facts.settings.async_level) == (60, "checkpoints", 2)
    assert facts.disk.version == 12000 and facts.disk.used["weights"] == 23000


def test_doctor_damaged_directory_is_diagnosed_without_control_characters(paths, capsys):
    for file in (paths.events, paths.metrics("trainer"), paths.heartbeat("trainer_0"), paths.lock, paths.run_toml):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\xff\x00[[]\n[]\n")
    paths.logs_dir.mkdir()
    paths.error("trainer").write_text("[]")
    paths.checkpoints_dir.write_text("a file")
    code, output = run(capsys, paths.root)
    assert code == 1 and "not running" in output.out
    paths.error("orchestrator").write_text(json.dumps({"code": 1, "message": "cannot parse \x1b[2J[red]a[/nothing]"}))
    _, output = run(capsys, paths.root)
    assert "cannot parse \\x1b[2J[red]a[/nothing]" in output.out and "run [1]" in output.out
    assert "\x1b" not in output.out


def test_doctor_finished_run_exits_with_0(paths, capsys):
    with HeartbeatWriter(paths, "trainer_0", "trainer"):
        pass
    paths.events.write_text('{"time": 1, "event": "started", "name": "trainer"}\n{"time": 2, "event": "finished"}\n')
    code, output = run(capsys, paths.root)
    assert code == 0
    assert "run [1]: finished" in output.out
    code, output = run(capsys, paths.root, "--json")
    assert (code, json.loads(output.out)["state"]) == (0, "finished")


@pytest.mark.parametrize(("name", "table"), [("run", "[[orchestrator.env]]"), ("configs/orchestrator", "[[env]]")])
def test_read_settings_lists_environments_that_run_programs_on_this_machine(tmp_path, name, table):
    file = tmp_path / f"{name}.toml"
    file.parent.mkdir(exist_ok=True)
    shell = 'id = "shell"\nruntime = "subprocess"'
    tables = ['id = "calculator"', shell, f'{shell}\nname = "other"']
    file.write_text("".join(f"{table}\n{lines}\n" for lines in tables))
    assert read_settings(RunPaths(tmp_path)).host_environments == ("shell", "other")


def test_read_settings_of_separately_started_processes_reads_their_own_files(tmp_path):
    paths = RunPaths(tmp_path)
    given = ["--max-steps", "7", "--async-level", "1", "--heartbeat.dead-after-seconds", "33"]
    Monitor(paths, "trainer", None, TrainerConfig.load(given)).close()
    assert (read_settings(paths).max_steps, read_settings(paths).async_level) == (7, 1)
    assert read_settings(paths).speed.limit_key == "orchestrator.concurrency.max"
    config = OrchestratorConfig.load([*given, "--pass-threshold", "0.5", "--max-concurrent", "9"])
    write_config(config, paths.config("orchestrator"))
    assert read_settings(paths).speed.limit_key == "orchestrator.max_concurrent"
    config = read_run_config(paths)
    assert config["heartbeat"]["dead_after_seconds"] == 33
    assert pass_threshold(config) == 0.5
    adapters = ["--trainer.model.lora.publish", "adapter", "--inference.enable-lora", "true"]
    whole = RLConfig.load(["--max-steps", "60", "--inference.vllm.max-num-seqs", "2", *adapters])
    write_config(whole, paths.run_toml)
    assert read_settings(paths).max_steps == 60, "under `rl` its file counts"
    speed = SpeedSettings("orchestrator.concurrency.max", request_limit=2, publishes_adapters=True)
    assert read_settings(paths).speed == speed_settings(whole.model_dump()) == speed


SLOT = "wait for a slot: 2 runs use this trainer, position 1"


def log(paths, role, rows, first=0):
    monitor = Monitor(paths, role, None)
    for step, row in enumerate(rows, first):
        monitor.log(step, row)
    monitor.close()


@pytest.fixture
def shared(tmp_path):
    """The directory of a trainer of several runs, and a function that adds a run with the phase of its trainer."""
    paths = RunPaths(tmp_path / "shared")
    with ExitStack() as stack:

        def begin(paths, name, phase, **options):
            heart = HeartbeatWriter(paths, name, name.partition("_")[0], 0.02, **options)
            heart.enter(phase)
            return stack.enter_context(heart)

        def add(name, phase=None, steps=0):
            run = RunPaths(paths.root / f"run_{name}")
            write_config(OrchestratorConfig.load(["--max-steps", "20"]), run.config("orchestrator"))
            log(run, "orchestrator", [{"reward/mean": 0.25}] * steps)
            log(run, "trainer", [{"time/step": 1.0}] * steps)
            return run, *(begin(run, "trainer_0", phase) for _ in range(phase is not None))

        for rank in range(2):
            begin(paths, f"trainer_{rank}", "iteration 40", settings={"max_concurrent_runs": 2})
        counts = {"runs/active": 2, "runs/waiting": 1, "runs/in_iteration": 1, "tokens": 9, "time/step": 2.0}
        log(paths, "trainer", [counts], first=39)
        yield paths, add, begin


def test_doctor_of_a_shared_trainer_lists_the_state_of_each_run(shared, capsys, quick):
    paths, add, begin = shared
    run_of = {}
    for name, phase, steps in (("alpha", "step 3", 3), ("beta", SLOT, 0), ("gamma", "finish writing", 20)):
        run_of[name], trainer = add(name, phase, steps)
        orchestrator = begin(run_of[name], "orchestrator", "sample")
        if name == "gamma":
            trainer.close()
            orchestrator.close()
    (paths.root / "run_empty").mkdir()
    code, output = run(capsys, paths.root)
    rows = {words[0]: " ".join(words[1:]) for line in output.out.splitlines() if (words := line.split())}
    assert code == 0, output.out
    assert rows["run_alpha"] == "training: step 3 3 of 20 steps 0.250"
    assert rows["run_beta"] == "waiting: 2 runs use this trainer, position 1 0 of 20 steps"
    assert rows["run_gamma"] == "finished 20 of 20 steps 0.250"
    assert rows["iterations"] == "40 steps, last step 2 s"
    assert "trainer_1" in rows and "run_empty" not in output.out
    code, output = run(capsys, run_of["beta"].root)
    assert code == 0 and SLOT in output.out and "run_alpha" not in output.out


def test_doctor_of_a_shared_trainer_exits_with_the_code_of_the_worst_run(shared, capsys, quick, monkeypatch):
    paths, add, begin = shared
    for name, file in (("delta", "refused.txt"), ("epsilon", "evicted.txt")):
        refused, *_ = add(name)
        (refused.root / "configs" / file).write_text(f"the rank of {name} is too large\n")
        begin(refused, "orchestrator", "start").close("failed")
    lost, _ = add("zeta", "wait for batch 3", 3)
    killed = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "orchestrator", "", str(lost.root)], stdout=subprocess.PIPE
    )
    killed.stdout.readline()
    killed.kill()
    killed.communicate()
    error = RunPaths(paths.root / "run_early").error("orchestrator")
    error.parent.mkdir(parents=True)
    monkeypatch.setenv(ERROR_FILE, str(error))
    write_error_file("env.id = 'x' does not exist", 2)  # before its first heartbeat
    code, output = run(capsys, paths.root, "--json")
    result = json.loads(output.out)
    assert (code, result["state"], result["culprit"]) == (1, "running", "run_early/orchestrator")
    assert {one["name"]: one["summary"] for one in result["runs"]} == {
        "run_early": "dead",
        "run_delta": "refused: the rank of delta is too large",
        "run_epsilon": "evicted: the rank of epsilon is too large",
        "run_zeta": "orchestrator dead",
    }
    texts = [problem["text"] for problem in result["problems"]]
    assert [text.split(":")[0] for text in texts] == ["run_delta", "run_early", "run_epsilon", "run_zeta"]
    assert texts[1] == "run_early: orchestrator has failed: env.id = 'x' does not exist"
    assert "its process no longer exists" in texts[3]
    [evicted] = [one for one in result["runs"] if one["name"] == "run_epsilon"]
    code, output = run(capsys, paths.root / "run_epsilon", "--json")
    [problem] = json.loads(output.out)["problems"]
    assert code == 1 and [problem["text"]] == [p["text"] for p in evicted["problems"]]
    assert "evicted.txt, and start its orchestrator again" in problem["hint"]
