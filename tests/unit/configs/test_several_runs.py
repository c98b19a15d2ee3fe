"""Keys of `rl` for several runs in one trainer, and for a run that joins a trainer."""

import itertools
import json
import shutil
import socket
import subprocess
from functools import partial

import pytest

from prime_rl.configs.loading.base_config import to_toml, write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_monitor import HeartbeatMonitor
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.checkpoint_artifacts import read_stop
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE
from prime_rl.supervisor import launch, launch_specs, preflight
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.preflight import check_trainer_to_join, clear_run_directory

SHARED = ["--trainer.model.lora.rank", "8", "--trainer.max-concurrent-runs", "2"]
TOML = """
max_steps = 20
seq_len = 64
[trainer]
max_concurrent_runs = 2
[trainer.model.lora]
rank = 8
[trainer.scheduler]
type = "cosine"
[orchestrator]
batch_size = 16
optim.lr = 1e-3
[orchestrator.ckpt]
interval = 5
[inference]
[wandb]
project = "p"
[runs.alpha]
[runs.beta]
model.lora.rank = 4
max_steps = 5
loss = { type = "grpo", eps_high = 0.3 }
env = [{ id = "a" }, { id = "b" }]
"""


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "r.toml").write_text(TOML)
    return RLConfig.load(["@", str(tmp_path / "r.toml"), "--output-dir", str(tmp_path / "out"), "--exp-id", "e"])


def test_runs_change_the_orchestrator_and_have_their_own_folders(shared, tmp_path):
    alpha, beta = shared.orchestrators.values()
    assert [*shared.orchestrators] == ["run_alpha", "run_beta"]
    assert [run.output_dir for run in (alpha, beta)] == [tmp_path / "out/e/run_alpha", tmp_path / "out/e/run_beta"]
    assert (alpha.max_steps, alpha.optim, alpha.model.lora.name, alpha.wandb.name) == (
        20, {"lr": 1e-3}, "run_alpha", "alpha",
    )  # fmt: skip
    assert (beta.max_steps, beta.model.lora.rank, beta.loss["eps_high"]) == (5, 4, 0.3)
    assert [env.id for env in beta.env] == ["a", "b"] and beta.batch_size == 16 and beta.optim == {"lr": 1e-3}
    assert alpha.training_keys == ["optim.lr"]
    assert beta.training_keys == ["optim.lr", "loss.type", "loss.eps_high", "model.lora.rank"]


def test_runs_trainer_and_server_get_what_they_need(shared):
    trainer, inference = shared.trainer, shared.inference
    assert (trainer.max_steps, trainer.ckpt, trainer.wandb) == (None, None, None), "each run has its own"
    assert trainer.model.lora.publish == "adapter" and trainer.exit_when_idle_seconds is not None
    assert (inference.enable_lora, inference.max_lora_rank, inference.max_loras) == (True, 8, 3)


def test_runs_flags_override_recorded_runs(shared, tmp_path):
    (file := tmp_path / "resolved.toml").write_text(to_toml(shared))
    assert RLConfig.load(["@", str(file)]) == shared
    keys = ["--ckpt.resume-step", "-1", "--max-steps", "40", "--wandb.project", "q", "--orchestrator.env.0.id", "c"]
    config = RLConfig.load(["@", str(file), *keys, "--runs.beta.max-steps", "30"])
    alpha, beta = config.orchestrators.values()
    assert (alpha.max_steps, beta.max_steps) == (40, 30)
    for name, run, before in zip(("alpha", "beta"), (alpha, beta), shared.orchestrators.values(), strict=True):
        assert (run.ckpt.resume_step, run.ckpt.interval, run.wandb.project, run.wandb.name) == (-1, 5, "q", name)
        assert (run.output_dir, run.model, run.optim, run.loss) == (
            before.output_dir, before.model, before.optim, before.loss,
        )  # fmt: skip
        assert [env.id for env in run.env] == ["c", *(env.id for env in before.env[1:])]
    plain = RLConfig.load(["@", str(file), "--no-ckpt", "--no-wandb"])
    assert (plain.runs["beta"].ckpt, plain.runs["beta"].wandb) == (None, None)
    file.write_text(to_toml(plain))
    beta = RLConfig.load(["@", str(file), "--ckpt", "--ckpt.interval", "7", "--wandb"]).runs["beta"]
    assert (beta.ckpt.interval, beta.wandb.name) == (7, "beta")


def test_runs_flags_override_files_and_one_run_is_the_default(tmp_path):
    (tmp_path / "r.toml").write_text(TOML)
    config = RLConfig.load(["@", str(tmp_path / "r.toml"), "--runs.alpha.optim.lr", "3e-5", "--runs.beta.seed", "7"])
    assert config.runs["alpha"].optim == {"lr": 3e-5}
    assert (config.runs["beta"].seed, config.runs["beta"].model.lora.rank) == (7, 4)
    assert [*RLConfig.load(SHARED).orchestrators] == ["run_default"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--runs.a.max-steps", "3"], ["runs share one trainer", "trainer.max_concurrent_runs to 2"]),
        (["--orchestrator.optim.lr", "1"], ["orchestrator.optim.lr is for a trainer of several", "set trainer.optim"]),
        ([*SHARED, "--runs.a.optimm.lr", "1"], ["unknown key optimm (runs.a in --runs.a", "did you mean optim"]),
        ([*SHARED, "--runs.a.max-steps", "x"], ["runs.a.max_steps = 'x' (--runs.a.max-steps)", "valid integer"]),
        ([*SHARED, "--runs.a", "3"], ["runs.a (--runs.a) is not a name with a table"]),
        ([*SHARED, "--runs.a b.seed", "3"], ["runs.a b"]),
        ([*SHARED, "--runs.a.seq-len", "9999"], ["is shorter than orchestrator.seq_len = 9999"]),
        ([*SHARED, "--max-epochs", "1"], ["max_epochs", "several runs"]),
        ([*SHARED, "--inference.max-loras", "1"], ["max_loras = 1 is below trainer.max_concurrent_runs = 2"]),
        ([*SHARED, "--inference.relay.urls", "http://a:1"], ["inference.relay", "one run at a time"]),
        (["--join", "out"], ["join needs the name of the run: --exp-id NAME"]),
    ],
)  # fmt: skip
def test_runs_bad_input_is_refused_in_one_line(argv, parts):
    with pytest.raises(ConfigError) as error:
        RLConfig.load(argv)
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in parts), text


def test_join_takes_the_server_and_the_keys_of_the_run(shared, tmp_path):
    root = shared.output_dir
    record = shared.runs["alpha"].model_copy(
        update={"client": shared.orchestrator.client.model_copy(update={"port": 8123})}
    )
    write_config(record, RunPaths(root / "run_alpha").config("orchestrator"))
    (tmp_path / "other.toml").write_text(
        "max_steps = 3\n[trainer]\nnum_minibatches = 2\n[trainer.optim]\nlr = 2e-4\n[orchestrator.loss]\ntype = 'ppo'\n"
        "[trainer.model.lora]\nrank = 2\n[inference]\n"
    )
    config = RLConfig.load(["@", str(tmp_path / "other.toml"), "--join", str(root), "--exp-id", "gamma"])
    ((name, run),) = config.orchestrators.items()
    assert name == "run_gamma" and run.output_dir == config.output_dir == root / "run_gamma"
    assert config.inference is None and run.client.port == 8123
    assert run.training_keys == ["optim.lr", "loss.type", "num_minibatches", "model.lora.rank"]
    assert (run.optim, run.num_minibatches, run.model.lora.rank) == ({"lr": 2e-4}, 2, 2)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert RLConfig.load(["@", str(tmp_path / "resolved.toml")]) == config
    chosen = RLConfig.load(["--join", str(root), "--exp-id", "gamma", "--orchestrator.client.port", "9000"])
    assert chosen.runs["gamma"].client.port == 9000
    (written := RunPaths(root).config("run_alpha")).parent.mkdir()
    written.write_text("[client]\nport = 8124\n")
    write_config(record, RunPaths(root / "run_alpha").config("orchestrator"))  # newer, but not by `rl`
    keys = ["--join", str(root), "--exp-id", "gamma"]
    assert RLConfig.load(keys).runs["gamma"].client.port == 8124
    written.write_text("max_steps = 3\n")
    assert RLConfig.load(keys).runs["gamma"].client.port == 8000


def test_join_of_a_directory_without_a_trainer_leaves_nothing_there(tmp_path):
    config = RLConfig.load(["--join", str(tmp_path / "wrong"), "--exp-id", "gamma"])
    with pytest.raises(ConfigError, match="no trainer runs in"):
        launch.run(config, None)
    assert not (tmp_path / "wrong").exists()


def test_join_starts_an_orchestrator_alone_which_watches_the_trainer(shared, monkeypatch):
    monkeypatch.delenv("PRIME_RL_SUPERVISED", raising=False)
    config = RLConfig.load(["--join", str(shared.output_dir), "--exp-id", "gamma"])
    (spec,) = make_process_specs(config, config.run_paths)
    assert (spec.name, spec.log) == ("run_gamma", config.output_dir / "logs/orchestrator.log")
    assert "PRIME_RL_SUPERVISED" not in spec.env and "PRIME_RL_START" not in spec.env
    assert not config.run_paths.config("orchestrator").exists(), "the orchestrator announces the run"


def test_make_process_specs_has_an_orchestrator_for_each_run(shared):
    specs = {spec.name: spec for spec in make_process_specs(shared, shared.run_paths)}
    assert [*specs] == ["inference", "run_alpha", "run_beta", "trainer"]
    assert specs["run_beta"].log == shared.output_dir / "run_beta/logs/orchestrator.log"
    assert [spec.fails_alone for spec in specs.values()] == [False, True, True, False]


def test_make_process_specs_trainer_asked_to_stop_stops_all_runs(tmp_path):
    """Without checkpoints of its own too: a run that joined may have them."""
    config = RLConfig.load([*SHARED, "--output-dir", str(tmp_path), "--no-ckpt"])
    trainer = make_process_specs(config, config.run_paths)[-1]
    trainer.request_stop()
    (stop,) = tmp_path.rglob("STOP.json")
    assert stop == tmp_path / "checkpoints/STOP.json"
    assert read_stop(stop.parent).start == trainer.env[START_VARIABLE]


def beat(paths, name="orchestrator", role="orchestrator", **options):
    """Write one heartbeat."""
    paths.heartbeats_dir.mkdir(parents=True, exist_ok=True)
    writer = HeartbeatWriter(paths, name, role, **options)
    writer._write()
    return writer


def test_make_process_specs_run_that_was_evicted_or_removed_is_over(shared):
    specs = {spec.name: spec for spec in make_process_specs(shared, shared.run_paths)}
    paths, spec = RunPaths(shared.output_dir / "run_alpha"), specs["run_alpha"]
    spec.log.parent.mkdir(parents=True)
    spec.log.touch()
    assert not spec.is_over(), "it has failed before it announced the run"
    write_config(shared.runs["alpha"], paths.config("orchestrator"))
    beat(paths)
    assert not spec.is_over()
    paths.evicted.touch()
    assert spec.is_over()
    paths.evicted.unlink()
    paths.config("orchestrator").unlink()
    assert spec.is_over()
    shutil.rmtree(paths.root)
    assert spec.is_over()
    assert not specs["trainer"].is_over() and not specs["inference"].is_over()


def test_make_process_specs_trainer_is_in_use_by_a_run_that_joined_or_was_resumed_and_lives(shared):
    trainer = make_process_specs(shared, shared.run_paths)[-1]
    assert "run_alpha" in shared.orchestrators, "`rl` has started it: the user resumed it after a failure"
    for name in ("run_alpha", "run_other"):
        assert not trainer.in_use()
        running = beat(RunPaths(shared.output_dir / name))
        assert trainer.in_use()
        running.close()
    dead = RunPaths(shared.output_dir / "run_dead")
    beat(dead)
    heartbeat = dead.heartbeat("orchestrator")
    ended = subprocess.Popen(["true"])
    ended.wait()
    heartbeat.write_text(json.dumps(json.loads(heartbeat.read_text()) | {"pid": ended.pid}))
    trainer.in_use()
    assert not trainer.in_use(), "a process of this machine that is gone"


def test_make_process_specs_trainer_is_not_in_use_by_a_silent_run_of_another_machine(shared, monkeypatch):
    one_second_each = partial(HeartbeatMonitor, clock=itertools.count().__next__)
    monkeypatch.setattr(launch_specs, "HeartbeatMonitor", one_second_each)
    trainer = make_process_specs(shared, shared.run_paths)[-1]
    paths = RunPaths(shared.output_dir / "run_other")
    beat(paths)
    file = paths.heartbeat("orchestrator")
    file.write_text(file.read_text().replace(socket.gethostname(), "elsewhere"))
    limit = int(shared.heartbeat.dead_after_seconds)
    answers = [trainer.in_use() for _ in range(limit + 3)]
    assert all(answers[:limit]) and not answers[-1]


def test_check_trainer_to_join_needs_a_running_trainer_of_several_runs(tmp_path):
    with pytest.raises(ConfigError, match="no trainer runs in"):
        check_trainer_to_join(tmp_path)
    for settings in ({}, {"max_concurrent_runs": 1}):
        beat(RunPaths(tmp_path), "trainer_0", "trainer", settings=settings)
        with pytest.raises(ConfigError, match="has one run"):
            check_trainer_to_join(tmp_path)
    beat(RunPaths(tmp_path), "trainer_0", "trainer", settings={"max_concurrent_runs": 2})
    check_trainer_to_join(tmp_path)


def test_clear_run_directory_moves_all_runs_but_those_that_resume(shared, monkeypatch):
    monkeypatch.setattr(preflight, "check_not_read", lambda *_: None)
    paths = shared.run_paths
    for name in ("run_alpha", "run_beta", "run_old"):
        write_config(shared.orchestrator, RunPaths(paths.root / name).config("orchestrator"))
    (paths.root / "run_data").mkdir()
    paths.events.touch()
    write_config(shared.orchestrator, paths.config("run_alpha"))
    ckpt = shared.runs["beta"].ckpt.model_copy(update={"resume_step": -1})
    runs = shared.runs | {"beta": shared.runs["beta"].model_copy(update={"ckpt": ckpt})}
    assert "moved" in clear_run_directory(shared.model_copy(update={"runs": runs}), paths)
    kept = {path.name for path in paths.root.glob("run_*")}
    assert kept == {"run_beta", "run_data", "run_old"} and paths.events.exists(), "the last one may have joined"
    assert "moved" in clear_run_directory(shared, paths)
    assert {path.name for path in paths.root.glob("run_*")} == {"run_data"} and not paths.events.exists()
    assert not paths.config("run_alpha").exists()
