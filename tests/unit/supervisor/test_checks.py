"""What `rl` refuses before it starts anything, and what it clears away."""

import json
import socket

import pytest

from prime_rl.configs import RLConfig
from prime_rl.errors import ConfigError
from prime_rl.run.paths import RunPaths
from prime_rl.run.ports import claim_port
from prime_rl.supervisor import checks, roles
from prime_rl.supervisor.lock import hold_lock
from prime_rl.supervisor.process import SUPERVISED
from prime_rl.supervisor.progress import JsonTail, Story
from prime_rl.supervisor.roles import make_roles
from prime_rl.supervisor.supervise import tail


def refused(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_port_in_use_is_named_with_its_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused(checks.check_port, "127.0.0.1", port, "--inference.server.port")
        assert str(port) in text
        assert "--inference.server.port" in text
    checks.check_port("127.0.0.1", port, "--inference.server.port")
    with claim_port(port):
        assert str(port) in refused(checks.check_port, "127.0.0.1", port, "--inference.server.port")
    assert "no.such.host.invalid" in refused(checks.check_port, "no.such.host.invalid", 1, "--x")


def test_model_that_is_no_directory(tmp_path):
    checks.check_model("Qwen/Qwen3-0.6B")
    for name in ("configs/no/model", "./model", str(tmp_path / "model")):
        assert name in refused(checks.check_model, name)
    assert "config.json" in refused(checks.check_model, str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    checks.check_model(str(tmp_path))


def test_environment_that_is_not_installed():
    checks.check_environment("json", "env")
    text = refused(checks.check_environment, "owner/no-such-environment", "orchestrator.env.0.id")
    assert "orchestrator.env.0.id = owner/no-such-environment is not installed" in text
    assert "environments/no_such_environment" in text


def test_gpu_ids_that_are_not_there():
    config = RLConfig.load(["--inference"])
    checks.check_gpus(config, [])
    checks.check_gpus(config, ["0", "1"])
    text = refused(checks.check_gpus, config, ["0"])
    assert "trainer_gpu_ids names GPU 1, but 1 GPU(s)" in text
    assert "--trainer-gpu-ids 0 --inference-gpu-ids 0" in text
    shared = RLConfig.load(["--inference", "--trainer-gpu-ids", "0", "--inference-gpu-ids", "0"])
    checks.check_gpus(shared, ["0"])
    assert "trainer_ranks = 3" in refused(checks.check_gpus, RLConfig.load(["--trainer-ranks", "3"]), ["0", "1"])


def test_visible_gpus_follow_the_variable(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert checks.visible_gpus() == ["3", "5"]
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert checks.visible_gpus() == []


def test_output_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), hold_lock(RunPaths(tmp_path / "file/out")):
        pass


def test_missing_server_is_noticed():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
        config = RLConfig.load(["--orchestrator.client.port", port, "--orchestrator.client.host", "127.0.0.1"])
        assert list(checks.unreachable_servers(config)) == [f"http://127.0.0.1:{port}"]
        server.listen()
        assert list(checks.unreachable_servers(config)) == []


@pytest.fixture
def earlier_run(tmp_path):
    paths = RunPaths(tmp_path)
    for file in (paths.rollouts(0), paths.weights(1), paths.checkpoint(1), paths.torchrun_logs):
        file.mkdir(parents=True)
    for file in (
        paths.metrics("trainer"),
        paths.samples(0),
        paths.ledger(0),
        paths.spool(0),
        tmp_path / "mine.txt",
        paths.log("trainer"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    return paths


def test_earlier_run_is_removed_but_for_its_checkpoints(earlier_run):
    removed = checks.clear_earlier_run(RLConfig(), earlier_run)
    assert len(removed) == 7
    left = {path.name for path in earlier_run.root.iterdir()}
    assert left == {"mine.txt", "logs", "abandoned"}
    (moved,) = earlier_run.abandoned_dir.iterdir()
    assert (moved / "checkpoints/step_1").is_dir()
    assert checks.clear_earlier_run(RLConfig(clean=False), earlier_run) == []


def test_earlier_run_is_kept_on_request_and_for_a_resume(earlier_run):
    assert "rollouts/ of an earlier run" in refused(checks.clear_earlier_run, RLConfig(clean=False), earlier_run)
    assert checks.clear_earlier_run(RLConfig.load(["--ckpt.resume-step", "1"]), earlier_run) == []
    assert earlier_run.weights(1).is_dir()


def test_a_resume_from_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "checkpoints/step_2").mkdir(parents=True)
    config = RLConfig.load(["--output-dir", str(tmp_path), "--ckpt.resume-step", "2"])
    message = refused(checks.check_resume, config)
    assert "no complete checkpoint of it (was not finished:" in message and "complete are: none" in message
    checks.check_resume(RLConfig.load(["--output-dir", str(tmp_path), "--ckpt.resume-step", "-1"]))


def test_roles_get_their_configuration_gpus_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(roles, "visible_gpus", lambda: ["4", "5", "6"])
    argv = ["--inference", "--output-dir", str(tmp_path), "--inference-gpus", "2", "--max-steps", "3"]
    config = RLConfig.load(argv)
    paths = RunPaths(tmp_path)
    inference, orchestrator, trainer = made = make_roles(config, paths)
    assert [role.name for role in made] == ["inference", "orchestrator", "trainer"]
    assert [role.env["CUDA_VISIBLE_DEVICES"] for role in made] == ["4,5", "", "6"]
    assert "--nproc-per-node=1" in trainer.argv
    assert (inference.finishes, orchestrator.finishes, trainer.last) == (False, True, True)
    for role, part in zip(made, (config.inference, config.orchestrator, config.trainer), strict=True):
        assert role.env[SUPERVISED] == "1"
        assert role.argv[-2:] == ["@", str(paths.config(role.name))]
        assert type(part).load(["@", str(paths.config(role.name))]) == part
    assert RLConfig.load(["@", str(paths.run_toml)]) == config


def test_roles_without_a_gpu_or_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(roles, "visible_gpus", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = make_roles(RLConfig.load(["--output-dir", str(tmp_path), "--trainer-ranks", "2"]), RunPaths(tmp_path))
    assert [role.name for role in made] == ["orchestrator", "trainer"]
    assert "CUDA_VISIBLE_DEVICES" not in made[1].env
    assert "--nproc-per-node=2" in made[1].argv


def test_half_a_line_of_metrics_waits(tmp_path):
    file = tmp_path / "trainer.jsonl"
    lines = JsonTail(file)
    assert list(lines.read()) == []
    file.write_text('{"step": 0}\n{"st')
    assert list(lines.read()) == [{"step": 0}]
    with file.open("a") as more:
        more.write('ep": 1}\n')
    assert list(lines.read()) == [{"step": 1}]


def test_metrics_that_a_resume_has_cut_are_read_on(tmp_path):
    """Neither from the middle of a line of the new file, nor the lines again that it has kept."""
    file = tmp_path / "trainer.jsonl"
    lines = JsonTail(file)
    file.write_text("".join(f'{{"step": {step}, "old": true}}\n' for step in range(4)))
    assert len(list(lines.read())) == 4
    cut = tmp_path / "cut"
    cut.write_text("".join(file.read_text().splitlines(keepends=True)[:2]) + '{"step": 2, "new": "and rather long"}\n')
    cut.rename(file)
    assert list(lines.read()) == [{"step": 2, "new": "and rather long"}]
    with file.open("a") as more:
        more.write('{"step": 3}\n')
    assert list(lines.read()) == [{"step": 3}]


def test_story_joins_what_both_report_of_a_step():
    story = Story()
    assert list(story.add("orchestrator", {"step": 0, "reward/mean": 0.5, "staleness/max": 1, "time/step": 9})) == []
    assert list(story.add("orchestrator", {"step": 1, "reward/mean": 0.7, "staleness/max": 0})) == []
    (step,) = story.add("trainer", {"step": 0, "loss": 1.0, "time/step": 2})
    assert step == {"step": 0, "reward/mean": 0.5, "staleness/max": 1, "loss": 1.0, "time/step": 2}
    assert story.eta_s(5) is None
    assert len(list(story.add("trainer", {"step": 1, "loss": 1.0}))) == 1
    assert (story.steps, story.rewards, story.staleness) == (2, [0.5, 0.7], 1)
    assert story.eta_s(5) >= 0
    assert story.eta_s(None) is None


def test_story_of_steps_that_are_done_again():
    """After a restart the trainer goes back, and both report those steps once more."""
    story = Story()
    for steps, reward in (((0, 1, 2), 0.1), ((1,), 0.5)):
        for step in steps:
            list(story.add("orchestrator", {"step": step, "reward/mean": reward}))
            list(story.add("trainer", {"step": step}))
    assert (story.steps, story.rewards) == (2, [0.1, 0.5])


def test_tail_of_a_log(tmp_path):
    (tmp_path / "log").write_text("\n".join(map(str, range(1000))))
    assert tail(tmp_path / "log", lines=2) == ["998", "999"]
    assert tail(tmp_path / "none") == []


def test_error_file_keeps_the_first_error(tmp_path, monkeypatch):
    from prime_rl.errors import ERROR_FILE, RunError, run_main

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))

    def fail(error):
        def main():
            raise error

        with pytest.raises(SystemExit):
            run_main(main)

    fail(ConfigError("first"))
    fail(RunError("second"))
    told = json.loads((tmp_path / "error.json").read_text())
    assert (told["code"], told["message"]) == (2, "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    fail(RunError("of a later attempt"))
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "of a later attempt"
