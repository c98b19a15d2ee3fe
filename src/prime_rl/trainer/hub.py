"""From a model's name to a directory with its files, downloaded at most once per node."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock

from prime_rl.errors import ConfigError, first_line

_WANTED = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


def local_directory(name: str) -> Path:
    """Return the directory of a model: `name` itself, or what the hub's cache holds after a download.

    The ranks of one node wait for the one of them that downloads; this takes as long as it takes.

    Raises:
        ConfigError: the hub does not have it, or cannot be asked.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"prime-rl--{name.replace('/', '--')}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            return Path(snapshot_download(name, allow_patterns=_WANTED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(f"model.name: cannot download {name!r}: {first_line(error)}") from error
