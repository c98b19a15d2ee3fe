"""Finds a model: a local directory, or files of the Hugging Face hub, downloaded with a time limit (I7).

The trainer, the inference server and the checks before a start use this module, so they accept the same names and load
the same files of the same revision.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.storage.file_locks import acquire_lock
from prime_rl.storage.wait_for import DeadlineError

if TYPE_CHECKING:
    import httpx

_DESCRIPTION = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
"""Files of configuration and tokenizer."""
_WEIGHTS = ["*.safetensors"]
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]
"""Copies of the weights in other formats, which some repositories contain."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts in a config.json."""
READABLE_QUANTIZATION = ("fp8", "mxfp4", "compressed-tensors")
"""Formats that scripts/dequantize.py reads, as `quant_method` in a config.json."""
_QUANTIZED_NAME = re.compile(
    r"[-_.](fp8|mxfp4|nvfp4|int[48]|w\d+a\d+|awq|gptq|bnb|[48]-?bit|quantized)\b.*", re.IGNORECASE
)
"""What names of quantized checkpoints add to those of the originals."""
_TIMEOUT_KEY = "model.download_timeout_seconds"
_HUB_TIMEOUT_SECONDS = 10.0


def find_model(name: str, revision: str | None, timeout_seconds: float, *, with_weights: bool = True) -> Path:
    """Return the directory of a model: `name` itself, or its directory in the hub's cache after a download.

    Args:
        name: directory or Hugging Face id.
        revision: branch, tag or commit of the hub; None is its default branch.
        timeout_seconds: limit of a download, with the wait for a download by another process of this node.
        with_weights: whether to download the weights, too.

    Raises:
        ConfigError: the name is invalid, a directory has a revision, or the hub lacks the model or cannot be reached.
        DeadlineError: the time limit passed.
    """
    return _find(name, revision, timeout_seconds, with_weights, "model.name")


def find_tokenizer(name: str | None, model: str, revision: str | None, timeout_seconds: float) -> Path:
    """Return the directory of the tokenizer `name`, by default the one of a model; raises as `find_model`."""
    if name is None or name == model:
        return _find(model, revision, timeout_seconds, False, "model.name")
    return _find(name, None, timeout_seconds, False, "tokenizer.name")


def check_model(name: str, with_weights: bool = True) -> None:
    """Raise ConfigError for a path that is no model directory, and for a name that the hub cannot have.

    `with_weights`: whether the directory must contain weights.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        _check_hub_name(name, "model.name")
    elif any(path.glob("model_*.pt")) and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.name = {name} is a checkpoint of nanochat; convert it to Hugging Face format with "
            "convert_nanochat_checkpoints.py of the transformers repository"
        )
    elif not (path / "config.json").is_file():
        raise ConfigError(f"model.name = {name} is not a model: the directory has no config.json")
    elif with_weights and not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model.name = {name} is a model without weights: the directory has no *.safetensors; save it with "
            "save_pretrained() of transformers"
        )
    else:
        refuse_quantized(name, _as_config((path / "config.json").read_text(errors="replace")))


def refuse_quantized(name: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config.json describes quantized weights, which are neither trained nor published."""
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quantization:
        return
    method, original = quantization.get("quant_method", "unknown"), _QUANTIZED_NAME.sub("", Path(name).name)
    advice = "use the original checkpoint" + (f", {original}" if original != Path(name).name else "")
    if method in READABLE_QUANTIZATION:
        advice += f", or write one in bfloat16: uv run python scripts/dequantize.py {name} DIR"
    raise ConfigError(f"model.name: {name} is quantized ({method}), and published versions are not; {advice}")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a mixture of experts."""
    return any(config.get("text_config", config).get(key) for key in _EXPERTS)


def check_on_hub(name: str, revision: str | None) -> None:
    """Reject a model that is neither a directory, nor in the cache, nor on the hub."""
    if Path(name).expanduser().is_dir():
        _refuse_revision(name, revision)
        return
    from huggingface_hub import constants, try_to_load_from_cache  # rarely needed, and slow to import

    _check_hub_name(name, "model.name")
    if isinstance(cached := try_to_load_from_cache(name, "config.json", revision=revision), str):
        refuse_quantized(name, _as_config(Path(cached).read_text(errors="replace")))
        return
    advice = "set a local directory with config.json, weights and tokenizer"
    what = f"model.name = {name}{_at(revision)}"
    branch = quote(revision, safe="") if revision is not None else "main"
    try:
        status = ask_hub(f"api/models/{name}{f'/revision/{branch}' if revision is not None else ''}").status_code
        config = ask_hub(f"{name}/resolve/{branch}/config.json") if status == 200 else None
    except ConnectionError as error:
        raise ConfigError(
            f"{what} is not in the cache, and {constants.ENDPOINT} cannot be reached: {error}; {advice}"
        ) from None
    if status in (401, 403, 404):
        raise ConfigError(
            f"{what} is no model of the hub that you can read (HTTP {status}); check the name, "
            f"set HF_TOKEN, or {advice}"
        )
    if config is not None and config.status_code == 200:
        refuse_quantized(name, _as_config(config.text))


def ask_hub(path: str) -> "httpx.Response":
    """Return what the hub answers to a request for a path, with the user's token. Raises ConnectionError."""
    from huggingface_hub import constants, get_token

    from prime_rl.core.http_requests import send_request

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    return send_request("GET", f"{constants.ENDPOINT}/{path}", _HUB_TIMEOUT_SECONDS, headers=headers)


def _as_config(text: str) -> Mapping[str, Any]:
    """Return a config.json; empty if it is invalid, which the process that loads the model explains."""
    with suppress(ValueError):
        if isinstance(config := json.loads(text), dict):
            return config
    return {}


def _find(name: str, revision: str | None, timeout_seconds: float, with_weights: bool, key: str) -> Path:
    if (directory := Path(name).expanduser()).is_dir():
        _refuse_revision(name, revision)
        return directory
    _check_hub_name(name, key)
    return _download(name, revision, timeout_seconds, with_weights, key)


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(
            f"model.revision = {revision} selects a revision of the hub, and {name} is a directory; remove it"
        )


def _check_hub_name(name: str, key: str) -> None:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{key} = {name} does not exist (looked in {Path.cwd()})")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(f"{key} = {name} is neither a directory nor a name of the hub, such as Qwen/Qwen3-0.6B")


def _at(revision: str | None) -> str:
    return f" (revision {revision})" if revision is not None else ""


@cache
def _download(name: str, revision: str | None, timeout_seconds: float, with_weights: bool, key: str) -> Path:
    deadline = time.monotonic() + timeout_seconds
    with _download_lock(name, timeout_seconds):
        try:
            answer = _run_download(name, revision, with_weights, deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            print(file=sys.stderr)  # ends the line of the progress bar
            raise DeadlineError(
                f"waited {timeout_seconds:.0f} s for the download of {name}{_at(revision)} ({_TIMEOUT_KEY})"
            ) from None
    if "error" in answer:
        raise ConfigError(
            f"{key} = {name}{_at(revision)} is not a directory and cannot be downloaded: {answer['error']}"
        )
    return Path(answer["directory"])


@contextmanager
def _download_lock(name: str, timeout_seconds: float) -> Iterator[None]:
    """Let one process of this node download a model at a time, where the cache has locks."""
    from huggingface_hub import constants

    with ExitStack() as stack:
        with suppress(OSError):  # a read-only cache, or a file system without locks
            path = Path(constants.HF_HUB_CACHE) / ".locks" / f"prime-rl--{name.replace('/', '--')}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a"))
            acquire_lock(file, timeout_seconds, f"downloads {name} ({_TIMEOUT_KEY})")
        yield


def _run_download(name: str, revision: str | None, with_weights: bool, timeout_seconds: float) -> dict[str, str]:
    """Download in a child process, which is killed at the deadline; raises TimeoutExpired.

    The hub's library downloads in threads, which cannot be cancelled and which delay the exit of their process.
    """
    command = [sys.executable, "-P", "-m", "prime_rl.storage.model_files", json.dumps([name, revision, with_weights])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.wait(timeout_seconds)
        finally:
            process.kill()
        lines = process.stdout.read().splitlines()  # the library may write lines before the answer
    return dict(json.loads(lines[-1])) if lines else {"error": f"the download exited with code {process.returncode}"}


def _exit_with_parent() -> None:
    # The parent writes nothing, so this returns when it exits. `sys.stdin` would hold a lock when this process exits.
    os.read(0, 1)
    os._exit(1)


def _main() -> None:
    """Download in this process; write the directory or an error to stdout."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    name, revision, with_weights = json.loads(sys.argv[1])
    wanted = [*_DESCRIPTION, *(_WEIGHTS if with_weights else [])]
    try:
        directory = snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_OTHER_FORMATS)
        answer = {"directory": directory}
    except (OSError, ValueError, HfHubHTTPError) as error:
        answer = {"error": summarize_exception(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
