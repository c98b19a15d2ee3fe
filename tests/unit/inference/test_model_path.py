"""Search for the base model."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.model_path import find_base_model

HEAD = "lm_head.weight"


def _model(directory: Path, config: dict[str, object], names: list[str]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros((2, 3), dtype=np.float32) for name in names}, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize(
    ("config", "names", "tied"),
    [
        ({"tie_word_embeddings": True}, ["embed", HEAD], True),
        ({"tie_word_embeddings": False}, ["embed", HEAD], False),
        ({}, ["embed", HEAD], False),
        ({}, ["embed"], True),
        ({"text_config": {"tie_word_embeddings": True}}, ["embed", HEAD], True),
    ],
)
def test_find_base_model_detects_a_tied_head(
    tmp_path: Path, config: dict[str, object], names: list[str], tied: bool
) -> None:
    base = find_base_model(_model(tmp_path, config, names))
    assert base.tied is tied
    assert base.shapes == dict.fromkeys(names, (2, 3))
    assert (base.policy.version, base.policy.path) == (PolicyVersion(0, 0), tmp_path)


def test_find_base_model_rejects_other_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="is not a Hugging Face model with safetensors weights"):
        find_base_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        find_base_model(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a local directory and cannot be downloaded"):
        find_base_model(str(tmp_path / "missing"))
