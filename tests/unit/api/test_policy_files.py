"""A run's policy as files and as a model."""

import shutil
from pathlib import Path

import pytest

import prime_rl
from prime_rl.api import policy_files
from prime_rl.api.child_command import ChildCommand
from prime_rl.api.policy_files import export_policy
from prime_rl.entrypoints import export
from prime_rl.storage.paths import RunPaths
from tests.support.tiny_model import publish_weights

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"


def test_export_policy_takes_the_newest_or_the_asked_version(tmp_path, monkeypatch):
    class InThisProcess(ChildCommand):
        def __init__(self, command, arguments, paths):
            monkeypatch.setattr("sys.argv", [command, *arguments])

        def wait(self):
            export.main()

    monkeypatch.setattr(policy_files, "ChildCommand", InThisProcess)
    older = shutil.copytree(MODEL, tmp_path / "older")
    (older / "chat_template.jinja").write_text("older")
    publish_weights(tmp_path, older, 2)
    publish_weights(tmp_path, MODEL, 10)
    newest = export_policy(RunPaths(tmp_path), tmp_path / "newest")
    assert (newest / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert (newest / "chat_template.jinja").read_text() != "older"
    assert (export_policy(RunPaths(tmp_path), tmp_path / "two", 2) / "chat_template.jinja").read_text() == "older"


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
