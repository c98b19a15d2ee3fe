"""Finding the base model on disk before anything slow is imported."""

import json
from dataclasses import dataclass
from pathlib import Path

from prime_rl.errors import ConfigError
from prime_rl.inference.weights import Policy, Shapes, read_shapes
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.tensors import content_hash, hash_tensors
from prime_rl.types import PolicyVersion

# Not the copies in other formats that some repositories hold.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model: policy version 0, and what a later version must look like."""

    policy: Policy
    shapes: Shapes
    tied: bool


def find_base_model(name: str, revision: str | None = None) -> BaseModel:
    """Find (or download) a model and read what identifies it. Reads all its weights once.

    Args:
        name: a local directory or a Hugging Face id.
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: it is neither, or holds no safetensors weights.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        directory = _download(name, revision)
    try:
        config = json.loads((directory / "config.json").read_text())
        tensors = hash_tensors(directory)
    except (ArtifactError, OSError, ValueError) as error:
        raise ConfigError(f"model.name: {name} is not a Hugging Face model with safetensors weights: {error}") from None
    shapes = read_shapes(directory)
    # A configuration that leaves the key out means its model class's default; a checkpoint without a head is clear.
    declared = config.get("text_config", config).get("tie_word_embeddings") or config.get("tie_word_embeddings")
    tied = declared is True or "lm_head.weight" not in shapes
    return BaseModel(Policy(PolicyVersion(0, 0), content_hash(tensors), directory, tensors), shapes, tied)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.name: {name} is no directory here, and the Hugging Face hub does not give it ({reason})"
        ) from None
