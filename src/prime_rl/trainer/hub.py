"""From a model's name to a directory with its files, downloaded at most once per node.

I7: neither a download nor the wait for another process that does it lasts for ever.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import Timeout
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock

from prime_rl.errors import ConfigError, first_line
from prime_rl.run.locks import holder
from prime_rl.run.threads import start
from prime_rl.run.wait import DeadlineError

Value = TypeVar("Value")

_WANTED = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


def local_directory(name: str, timeout_s: float = 3600) -> Path:
    """Return the directory of a model: `name` itself, or what the hub's cache holds after a download.

    The ranks of one node wait for the one of them that downloads.

    Args:
        name: directory or Hugging Face id.
        timeout_s: longest time to download it, and longest wait for another process of this node that does.

    Raises:
        ConfigError: the hub does not have it, or cannot be asked.
        DeadlineError: it took longer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"prime-rl--{name.replace('/', '--')}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock, timeout=timeout_s):
            what = f"the download of {name}, to {constants.HF_HUB_CACHE}"
            return Path(within(timeout_s, what, lambda: snapshot_download(name, allow_patterns=_WANTED)))
    except Timeout:
        raise DeadlineError(
            f"waited {timeout_s:.0f} s for {holder(lock)} to download {name} (model.download_timeout; lock {lock})"
        ) from None
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(f"model.name: cannot download {name!r}: {first_line(error)}") from error


def within(timeout_s: float, what: str, work: Callable[[], Value]) -> Value:
    """Do `work` in a thread that is left to itself if it takes too long: a library that waits cannot be told to stop.

    Raises:
        DeadlineError: it took longer; names `what`.
    """
    done = start(work, "within")
    try:
        return done.result(timeout_s)
    except TimeoutError:
        if done.done():  # it was the work's own
            raise
        raise DeadlineError(f"waited {timeout_s:.0f} s for {what} (model.download_timeout)") from None
