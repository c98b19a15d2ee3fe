"""Checks before `rl` starts processes, the clearing of a run directory, process specs, and metrics of a run."""

import fcntl
import json
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.core.entry_point import ERROR_FILE, ReportedError, read_error_file, run_main
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.ports import claim_port, find_free_port
from prime_rl.liveness.parent_process import SUPERVISED
from prime_rl.storage.file_locks import check_no_writer
from prime_rl.storage.model_files import check_model, check_on_hub
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor import launch, launch_specs, preflight, slurm_launch
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.run_progress import RunProgress


def refused(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_check_port_in_use_names_port_and_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused(preflight.check_port, "127.0.0.1", port, "--inference.server.port")
        assert str(port) in text
        assert "--inference.server.port" in text
    preflight.check_port("127.0.0.1", port, "--inference.server.port")
    with claim_port(port):
        assert str(port) in refused(preflight.check_port, "127.0.0.1", port, "--inference.server.port")
    assert "no.such.host.invalid" in refused(preflight.check_port, "no.such.host.invalid", 1, "--x")


def test_check_model_without_a_model_in_the_directory_is_rejected(tmp_path):
    check_model("Qwen/Qwen3-0.6B")
    assert "config.json" in refused(check_model, str(tmp_path))
    (tmp_path / "model_000650.pt").touch()
    assert "convert_nanochat_checkpoints.py" in refused(check_model, str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path), with_weights=False)
    assert "no *.safetensors" in refused(check_model, str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    check_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "transport", "is_refused"),
    [({"num_experts": 4}, "nccl", True), ({"num_experts": 4}, "filesystem", False), ({}, "nccl", False)],
)
def test_nccl_to_copies_of_experts_is_rejected_before_the_start(model, transport, is_refused, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(preflight, "check_gpus", lambda *_: None)
    arguments = ["--model.name", str(tmp_path), "--inference.parallel.dp", "2", "--inference-gpu-ids", "0,1"]
    arguments += ["--inference.server.port", str(find_free_port())]
    config = RLConfig.load([*arguments, "--trainer-gpu-ids", "2", "--trainer.weight-broadcast.type", transport])
    if is_refused:
        assert "inference.parallel.dp = 2" in refused(preflight.check_before_start, config)
    else:
        preflight.check_before_start(config)


def test_check_gpus_missing_ids_are_rejected():
    config = RLConfig.load(["--inference"])
    preflight.check_gpus(config, [])
    preflight.check_gpus(config, ["0", "1"])
    text = refused(preflight.check_gpus, config, ["0"])
    assert "trainer_gpu_ids names GPU 1, but 1 GPU(s)" in text
    assert "--trainer-gpu-ids 0 --inference-gpu-ids 0" in text
    shared = RLConfig.load(["--inference", "--trainer-gpu-ids", "0", "--inference-gpu-ids", "0"])
    preflight.check_gpus(shared, ["0"])
    assert "trainer_ranks = 3" in refused(preflight.check_gpus, RLConfig.load(["--trainer-ranks", "3"]), ["0", "1"])


@pytest.mark.parametrize(
    ("visible", "arguments", "named"),
    [
        ("", ["--trainer-gpus", "2"], "trainer_gpu_ids = [1, 2]"),
        ("-1", ["--inference", "--trainer-gpu-ids", "0", "--inference-gpus", "2"], "trainer_gpu_ids = [0], inference_"),
        ("", ["--inference"], None),
        ("0,1,2", ["--trainer-gpus", "2"], None),
    ],
)
def test_gpus_are_named_where_there_are_none(monkeypatch, visible, arguments, named):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert preflight.visible_gpus() == (visible.split(",") if "0" in visible else [])
    assert (preflight.gpus_that_are_not_there(RLConfig.load(arguments)) or "None").startswith(str(named))


def test_unreachable_servers_lists_a_missing_server():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
        config = RLConfig.load(["--orchestrator.client.port", port, "--orchestrator.client.host", "127.0.0.1"])
        assert list(preflight.unreachable_servers(config)) == [f"http://127.0.0.1:{port}"]
        server.listen()
        assert list(preflight.unreachable_servers(config)) == []


@pytest.fixture
def earlier_run(tmp_path):
    paths = RunPaths(tmp_path)
    for file in (paths.rollouts(0), paths.weights(1), paths.checkpoint(1), paths.torchrun_logs):
        file.mkdir(parents=True)
    written = paths.metrics("trainer"), paths.samples(0), paths.ledger(0), paths.spool(0), paths.log("trainer")
    for file in (*written, tmp_path / "mine.txt"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    return paths


def test_clear_run_directory_moves_an_earlier_run_or_removes_it(earlier_run):
    """A resumed run keeps it, and all keep the files of a server that was started without `rl`."""
    assert preflight.clear_run_directory(RLConfig.load(["--ckpt.resume-step", "1"]), earlier_run) is None
    assert earlier_run.weights(1).is_dir() and not earlier_run.earlier_dir.exists()
    for file in (earlier_run.log("inference"), earlier_run.heartbeat("inference")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("alive")
    line = preflight.clear_run_directory(RLConfig(), earlier_run)
    (moved,) = earlier_run.earlier_dir.iterdir()
    assert line == f"moved an earlier run (0.0 MB) to {moved}"
    assert (moved / "checkpoints/step_1").is_dir() and (moved / "logs/trainer.log").is_file()
    assert {path.name for path in earlier_run.root.iterdir()} == {"mine.txt", "logs", "earlier"}
    assert earlier_run.log("inference").exists()
    assert preflight.clear_run_directory(RLConfig(), earlier_run) is None
    moved.joinpath("weights").rename(earlier_run.weights_dir)
    assert "removed an earlier run" in preflight.clear_run_directory(RLConfig(clean=True), earlier_run)
    assert not earlier_run.weights_dir.exists() and moved.is_dir()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("--model.name", "{}/weights/step_1"),
        ("--orchestrator.env.0.args.data_path", "{}/samples/step_0.jsonl"),
        ("--orchestrator.env.0.rewards", "{}/metrics/trainer.jsonl.py:score"),
    ],
)
def test_clear_run_directory_refuses_a_run_that_reads_the_earlier_one(earlier_run, key, value):
    (earlier_run.root / "metrics/trainer.jsonl.py").touch()
    config = RLConfig.load(["--orchestrator.env.0.id", "dataset", key, value.format(earlier_run.root)])
    message = refused(preflight.clear_run_directory, config, earlier_run)
    assert "belongs to the earlier run in output_dir, which would be moved" in message
    assert earlier_run.weights(1).is_dir()


@pytest.mark.parametrize("name", ["weights", "heartbeats"])
def test_clear_run_directory_broken_symbolic_link_is_rejected(tmp_path, name):
    """Otherwise the processes would fail to create the directory, and write no heartbeat."""
    (tmp_path / name).symlink_to("/mnt/not_mounted")
    message = refused(preflight.clear_run_directory, RLConfig(), RunPaths(tmp_path))
    assert f"{tmp_path / name} is a symbolic link to /mnt/not_mounted, which does not exist" in message


@pytest.mark.parametrize("slurm", [[], ["--slurm.nodes", "2", "--no-slurm.submit"]])
def test_run_in_the_directory_of_a_standalone_trainer_is_refused(earlier_run, monkeypatch, slurm):
    for module in (launch, slurm_launch):
        monkeypatch.setattr(module, "check_no_writer", partial(check_no_writer, timeout_seconds=0))
    config = RLConfig.load(["--inference", "--output-dir", str(earlier_run.root), *slurm])
    with earlier_run.role_lock("trainer").open("w") as trainer:
        fcntl.flock(trainer, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"is in use: another process is its trainer"):
            slurm_launch.submit_to_slurm(config) if slurm else launch.run(config, None)
    assert earlier_run.weights(1).is_dir()


def test_check_resume_without_the_checkpoint_or_after_max_steps_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "checkpoints/step_2").mkdir(parents=True)
    output = ["--output-dir", str(tmp_path)]
    config = RLConfig.load([*output, "--ckpt.resume-step", "2"])
    message = refused(preflight.check_resume, config)
    assert "no complete checkpoint of this step (was not finished:" in message and "complete steps: none" in message
    latest = RLConfig.load([*output, "--ckpt.resume-step", "-1"])
    preflight.check_resume(latest)
    assert preflight.starts_without_checkpoint(latest)
    assert not preflight.starts_without_checkpoint(config)
    assert not preflight.starts_without_checkpoint(RLConfig.load([*output, "--ckpt"]))
    monkeypatch.setattr(preflight, "find_checkpoints", lambda directory: SimpleNamespace(steps=[2, 4], broken={}))
    for step in ("-1", "4"):
        arguments = [*output, "--ckpt.resume-step", step, "--max-steps"]
        preflight.check_resume(RLConfig.load([*arguments, "4"]))
        message = refused(preflight.check_resume, RLConfig.load([*arguments, "3"]))
        assert "max_steps = 3, but the checkpoint to resume from has completed 4 steps" in message
    message = refused(preflight.check_resume, RLConfig.load([*output, "--ckpt.path", "/other/disk"]))
    assert "/other/disk has checkpoints of an earlier run (steps 2 to 4)" in message


def test_check_on_hub_names_the_reason(monkeypatch, tmp_path):
    check_on_hub(str(tmp_path), None)
    assert "neither a directory nor a name" in refused(check_on_hub, "no such:model", None)

    quantized, original = "Qwen3-8B-FP8", "use the original checkpoint, Qwen3-8B"
    config = json.dumps({"quantization_config": {"quant_method": "fp8"}})

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            found = {"/api/models/me/model": 200, f"/api/models/me/{quantized}": 200, "/api/models/me/busy": 503}
            if self.path == f"/me/{quantized}/resolve/main/config.json":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(config.encode())
            else:
                self.send_error(found.get(self.path, 404))

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=lambda: [server.handle_request() for _ in range(6)])
        thread.start()
        check_on_hub("me/model", None)
        said = refused(check_on_hub, f"me/{quantized}", None)
        assert (
            f"is quantized (fp8), and published versions are not; {original}, or write one in bfloat16: uv run" in said
        )
        check_on_hub("me/busy", None)  # a later attempt may succeed
        assert "no model of the hub that you can read (HTTP 404)" in refused(check_on_hub, "me/modle", None)
        thread.join()
    assert "cannot be reached: [Errno 111]" in refused(check_on_hub, "me/model", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(check_on_hub, "me/model", None)


@pytest.mark.parametrize(
    ("name", "method", "advice"),
    [
        ("Qwen3-8B_GPTQ-Int4", "gptq", "original checkpoint, Qwen3-8B"),
        (
            "Kimi-K2",
            "compressed-tensors",
            "original checkpoint, or write one in bfloat16: uv run python scripts/dequant",
        ),
        ("Qwen3-8B", "bitsandbytes", "original checkpoint"),
    ],
)
def test_quantized_directory_is_refused_with_what_to_use(name, method, advice, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(
        json.dumps({"text_config": {"quantization_config": {"quant_method": method}}})
    )
    said = refused(check_model, str(tmp_path / name), False)
    assert f"{name} is quantized ({method}), " in said and f"; use the {advice}" in said
    assert ("dequantize" in said) == (method == "compressed-tensors")


def test_make_process_specs_sets_configuration_gpus_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_specs, "visible_gpus", lambda: ["4", "5", "6"])
    config = RLConfig.load(["--inference", "--output-dir", str(tmp_path), "--inference-gpus", "2", "--max-steps", "3"])
    paths = RunPaths(tmp_path)
    inference, orchestrator, trainer = made = make_process_specs(config, paths)
    assert [role.name for role in made] == ["inference", "orchestrator", "trainer"]
    assert [role.env["CUDA_VISIBLE_DEVICES"] for role in made] == ["4,5", "", "6"]
    assert "--nproc-per-node=1" in trainer.argv
    assert (inference.must_finish, orchestrator.must_finish, trainer.is_last) == (False, True, True)
    for role, part in zip(made, (config.inference, config.orchestrator, config.trainer), strict=True):
        assert role.env[SUPERVISED] == "1"
        assert role.argv[-2:] == ["@", str(paths.config(role.name))]
        assert type(part).load(["@", str(paths.config(role.name))]) == part
    assert RLConfig.load(["@", str(paths.run_toml)]) == config
    monkeypatch.setattr(launch_specs, "visible_gpus", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    alone = make_process_specs(RLConfig.load(["--output-dir", str(tmp_path), "--trainer-ranks", "2"]), paths)
    assert [role.name for role in alone] == ["orchestrator", "trainer"]
    assert "CUDA_VISIBLE_DEVICES" not in alone[1].env and "--nproc-per-node=2" in alone[1].argv


def test_run_progress_joins_the_metrics_of_trainer_and_orchestrator():
    story = RunProgress()
    assert list(story.add("orchestrator", {"step": 0, "reward/mean": 0.5, "staleness/max": 1, "time/step": 9})) == []
    assert list(story.add("orchestrator", {"step": 1, "reward/mean": 0.7, "staleness/max": 0})) == []
    (step,) = story.add("trainer", {"step": 0, "loss": 1.0, "time/step": 2})
    assert step == {"step": 0, "reward/mean": 0.5, "staleness/max": 1, "loss": 1.0, "time/step": 2}
    assert story.eta_seconds(5) is None
    assert len(list(story.add("trainer", {"step": 1, "loss": 1.0}))) == 1
    assert (story.steps, story.rewards, story.staleness) == (2, [0.5, 0.7], 1)
    assert story.eta_seconds(5) >= 0 and story.eta_seconds(None) is None
    list(story.add("orchestrator", {"step": 0, "reward/mean": 0.4}))  # again after a restart, which rolls back
    list(story.add("trainer", {"step": 0}))
    assert (story.steps, story.rewards) == (1, [0.4])


def test_error_file_keeps_the_first_error(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))

    def fail(error):
        def main():
            raise error

        with pytest.raises(SystemExit):
            run_main(main)

    fail(ConfigError("first"))
    fail(RunError("second"))
    error = json.loads((tmp_path / "error.json").read_text())
    assert (error["code"], error["message"]) == (2, "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    fail(RunError("of a later attempt"))
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "of a later attempt"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    fail(ConfigError("no file a\udcff.toml"))
    assert read_error_file(tmp_path / "error.json") == ReportedError(2, "no file a?.toml", "2")


def config(*arguments):
    sizes = ["--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "4"]  # 8 examples per step
    return RLConfig.load(["--orchestrator.env.id", "reverse_text", *sizes, *arguments])


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--max-epochs", "1"], 12),
        (["--max-epochs", "2"], 25),
        (["--max-epochs", "0.5", "--max-steps", "100"], 6),
        (["--max-epochs", "2", "--max-steps", "7"], 7),
        ([], None),
    ],
)
def test_epochs_limit_the_steps_of_all_processes(arguments, steps):
    limited = launch.limit_to_epochs(config(*arguments), 100)
    assert limited.max_steps == limited.trainer.max_steps == limited.orchestrator.max_steps == steps
    with pytest.raises(ConfigError, match=r"max_epochs = 0\.01 of 100 examples is less than one step of 8"):
        launch.limit_to_epochs(config("--max-epochs", "0.01"), 100)
