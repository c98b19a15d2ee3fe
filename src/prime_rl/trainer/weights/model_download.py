"""Downloads a model from the Hugging Face hub, at most once per node and with a time limit (I7)."""

from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TypeVar

from filelock import Timeout
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock

from prime_rl.core.daemon_futures import start_daemon_future
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.liveness.file_locks import describe_lock_holder
from prime_rl.storage.wait_for import DeadlineError

Value = TypeVar("Value")

_WANTED = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


def model_directory(name: str, timeout_s: float = 3600) -> Path:
    """Return the directory of a model: `name` itself, or its directory in the hub's cache after a download.

    Args:
        name: directory or Hugging Face id.
        timeout_s: time limit of the download, and of the wait for a download by another process of this node.

    Raises:
        ConfigError: the hub does not have the model, or cannot be reached.
        DeadlineError: the time limit passed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"prime-rl--{name.replace('/', '--')}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock, timeout=timeout_s):
            what = f"the download of {name}, to {constants.HF_HUB_CACHE}"
            return Path(run_with_timeout(timeout_s, what, lambda: snapshot_download(name, allow_patterns=_WANTED)))
    except Timeout:
        raise DeadlineError(
            f"waited {timeout_s:.0f} s for {describe_lock_holder(lock)} to download {name} "
            f"(model.download_timeout_seconds; lock {lock})"
        ) from None
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(f"model.name: cannot download {name!r}: {summarize_exception(error)}") from error


def run_with_timeout(timeout_s: float, what: str, work: Callable[[], Value]) -> Value:
    """Run `work` in a daemon thread, which keeps running after a timeout: a blocked library call cannot be cancelled.

    Raises:
        DeadlineError: the time limit passed; the message contains `what`.
    """
    done = start_daemon_future(work, "download")
    if futures.wait([done], timeout_s).not_done:
        raise DeadlineError(f"waited {timeout_s:.0f} s for {what} (model.download_timeout_seconds)")
    return done.result()
