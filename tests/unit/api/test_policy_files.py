"""A run's policy as files and as a model."""

import shutil
from pathlib import Path

import pytest

import prime_rl
from prime_rl.api.policy_files import export_policy
from prime_rl.core.errors import ConfigError
from prime_rl.storage.paths import RunPaths
from tests.support.tiny_model import publish_weights

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"


def test_export_policy_takes_the_newest_or_the_asked_version(tmp_path):
    older = shutil.copytree(MODEL, tmp_path / "older")
    (older / "chat_template.jinja").write_text("older")
    publish_weights(tmp_path, older, 2)
    publish_weights(tmp_path, MODEL, 10)
    (tmp_path / "weights/step_11").mkdir()  # being written
    newest = export_policy(RunPaths(tmp_path), tmp_path / "newest")
    assert not (newest / "manifest.json").exists()
    assert (newest / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert (export_policy(RunPaths(tmp_path), tmp_path / "two", 2) / "chat_template.jinja").read_text() == "older"


def test_export_policy_bad_input_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"no trained weights.*available steps: none"):
        export_policy(RunPaths(tmp_path), tmp_path / "model")
    with pytest.raises(ConfigError, match="exists already"):
        export_policy(RunPaths(tmp_path), tmp_path)


@pytest.mark.extended
def test_load_policy_gives_a_model_for_the_adapter(tmp_path):
    publish_weights(tmp_path, MODEL, 3)
    model, tokenizer = prime_rl.load_policy(tmp_path)
    adapter = prime_rl.PrimeIntellectRLAdapter(
        model=model, tokenizer=tokenizer, env_id="reverse-text", env_args={"words": 8}
    )
    assert len(adapter.load_environment().get_dataset()) == 8
    messages = [{"role": "user", "content": "abc"}]
    responses = adapter.generate_response(messages, num_samples=4)
    assert len(responses) == 4 and all(isinstance(text, str) for text in responses)
    greedy = adapter.generate_response(messages, num_samples=1, temperature=0)
    assert greedy == adapter.generate_response("abc", temperature=0)
    assert set(greedy[0]) <= set("abc"), "the model has learned to reverse words"
