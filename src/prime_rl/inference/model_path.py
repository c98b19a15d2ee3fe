"""Finds the base model on disk, before any slow import."""

import json
from pathlib import Path

from prime_rl.core.errors import ConfigError, summarize_exception, translate_error
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.weight_checks import PublishedPolicy, ServedModel, read_shapes
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors

# Some repositories contain copies in other formats.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


def find_base_model(name: str, revision: str | None = None) -> ServedModel:
    """Find a model in a local directory, or download it from the Hugging Face hub, and hash its weights.

    Raises:
        ConfigError: `name` is neither, or the model contains no safetensors weights.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        failed = f"model.name: {name} is not a local directory and cannot be downloaded from the Hugging Face hub"
        kinds = (HfHubHTTPError, OSError, ValueError)
        with translate_error(kinds, lambda error: ConfigError(f"{failed}: {summarize_exception(error)}")):
            directory = Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    invalid = f"model.name: {name} is not a Hugging Face model with safetensors weights"
    with translate_error((ArtifactError, OSError, ValueError), lambda error: ConfigError(f"{invalid}: {error}")):
        config = json.loads((directory / "config.json").read_text())
        tensors = hash_tensors(directory)
    shapes = read_shapes(directory)
    # Without the key, the default of the model class applies; a checkpoint without a head is tied in any case.
    declared = config.get("text_config", config).get("tie_word_embeddings") or config.get("tie_word_embeddings")
    tied = declared is True or "lm_head.weight" not in shapes
    return ServedModel(PublishedPolicy(PolicyVersion(0, 0), content_hash(tensors), directory, tensors), shapes, tied)
