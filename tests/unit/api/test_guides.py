"""The names of guides translate to keys of `rl` and `sft`."""

import json

import pytest

import prime_rl
from prime_rl import FSDP2Trainer, Orchestrator, SimpleSFTTrainer, vLLMInference
from prime_rl.api import guides


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The configurations of the runs that were asked for; none is started."""
    runs = []

    class Recorded(prime_rl.Run):
        def __init__(self, *arguments, **values):
            super().__init__(*arguments, output_dir=tmp_path, **values)
            runs.append(self.config)

        def __enter__(self):
            return []

        def __exit__(self, *error):
            """Nothing was started."""

    monkeypatch.setattr(guides, "Run", Recorded)
    return runs


def test_orchestrator_arguments_become_keys_of_rl(runs):
    trainer = FSDP2Trainer(model="some/model", optimizer="muon", num_gpus=3)
    trainer.add_environments(["reverse_text"])
    inference = vLLMInference(model_weights=trainer.get_weights(), num_gpus=2)
    orchestrator = Orchestrator(
        trainer=trainer, inference=inference, environments=["gsm8k"], batch_size=1024, async_mode=False
    )
    assert orchestrator.train(total_steps=100, checkpoint_every=10, log_every=5) is None
    (config,) = runs
    assert config.model.name == "some/model"
    assert (config.max_steps, config.ckpt.interval, config.async_level) == (100, 10, 0)
    assert (config.ranks, len(config.inference_gpu_ids), config.trainer.optim.type) == (3, 2, "muon")
    assert config.orchestrator.batch_size == 1024
    assert [env.id for env in config.orchestrator.env] == ["reverse_text", "gsm8k"]


def test_several_nodes_of_inference_are_the_first_of_the_named_ones(runs):
    trainer = FSDP2Trainer("some/model", num_gpus=8)
    inference = vLLMInference("some/model", num_nodes=2, num_gpus=8)
    Orchestrator(trainer, inference, ["gsm8k"], nodes=["a", "b", "c"]).train(total_steps=1)
    (config,) = runs
    assert (config.inference_nodes, config.nodes) == (2, ["a", "b", "c"])
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (list(range(8)), list(range(8)))


def test_bad_input_is_a_config_error():
    with pytest.raises(prime_rl.ConfigError, match=r"num_nodes=32.*name the nodes"):
        Orchestrator(FSDP2Trainer("some/model"), vLLMInference("some/model", num_nodes=32))
    with pytest.raises(prime_rl.ConfigError, match=r"get_weights\(\)"):
        Orchestrator(FSDP2Trainer("some/model"), vLLMInference("another/model"))


def test_simple_sft_trainer_trains_on_the_answers(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(guides, "sft", lambda model, data, **values: calls.append((model, data, values)) or data)
    environment = prime_rl.load_environment("reverse_text", words=3)
    trainer = SimpleSFTTrainer(model="some/model", environment=environment, num_gpus=1, output_dir=tmp_path)
    data = trainer.train(steps=1000)
    assert calls == [("some/model", data, {"num_gpus": 1, "max_steps": 1000, "output_dir": tmp_path})]
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["prompt"][-1]["content"][::-1] == row["completion"][0]["content"] for row in rows)
