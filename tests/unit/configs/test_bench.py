"""`--bench` shortens a run and gives each process what it needs to run alone; the resolved values load to the same."""

import pytest
import tomli_w

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig

LONG = {"max_steps": 500, "orchestrator": {"batch_size": 64, "seq_len": 256, "async_level": 2, "val": {}}}


@pytest.fixture
def long_run(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(tomli_w.dumps(LONG))
    return str(path)


def test_bench_of_rl_uses_the_batch_shape_of_the_orchestrator(long_run):
    config = RLConfig.load(["@", long_run, "--bench", "--trainer.data.fake.micro-batch-size", "3"])
    fake = config.trainer.data.fake
    assert (fake.batch_size, fake.seq_len, fake.micro_batch_size) == (64, 256, 3)
    assert {config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps} == {4}
    assert config.trainer.bench and config.orchestrator.bench
    assert config.run_paths.root == config.output_dir / "bench"
    config = RLConfig.load(["@", long_run])
    assert (config.max_steps, config.trainer.data.fake, config.run_paths.root) == (500, None, config.output_dir)


def test_bench_files_written_by_rl_load_to_the_same_values(long_run, tmp_path):
    """`rl` writes resolved files, which each process reads with `--bench` in them once more."""
    config = RLConfig.load(["@", long_run, "--bench", "--bench-steps", "7"])
    for name, root in (("trainer", TrainerConfig), ("orchestrator", OrchestratorConfig)):
        write_config(getattr(config, name), tmp_path / f"{name}.toml")
        loaded = root.load(["@", str(tmp_path / f"{name}.toml")])
        assert loaded.max_steps == 7
        write_config(loaded, tmp_path / "again.toml")
        assert root.load(["@", str(tmp_path / "again.toml")]) == loaded


def test_bench_of_the_orchestrator_keeps_one_batch_in_flight(long_run, tmp_path):
    (tmp_path / "o.toml").write_text(tomli_w.dumps(LONG["orchestrator"]))
    config = OrchestratorConfig.load(["@", str(tmp_path / "o.toml"), "--bench"])
    assert (config.max_steps, config.async_level, config.max_concurrent, config.val) == (4, 4, 64, None)
    assert OrchestratorConfig.load(["--bench"]).max_concurrent == 128
    assert OrchestratorConfig.load(["--bench", "--max-concurrent", "8"]).max_concurrent == 8


def test_bench_of_the_trainer_uses_fake_data_and_sft_its_own():
    assert TrainerConfig.load(["--bench"]).data.fake.batch_size == 8
    assert TrainerConfig.load(["--bench", "--data.fake", "{'batch_size': 128}"]).data.fake.batch_size == 128
    config = SFTConfig.load(["--max-steps", "90", "--bench"])
    assert (config.max_steps, config.data.type) == (4, "sft")
