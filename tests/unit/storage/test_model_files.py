"""Search and download of models, from a fake hub; see also tests/unit/inference/test_weight_checks.py."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.storage import model_files
from prime_rl.storage.model_files import find_model, find_tokenizer
from prime_rl.storage.wait_for import DeadlineError
from tests.support.trickling_hub import COMMIT, Hub, run_hub


@pytest.fixture(autouse=True)
def _no_earlier_downloads():
    model_files._download.cache_clear()


@pytest.fixture
def use_hub(tmp_path, monkeypatch):
    """Run a hub and use it in this process."""
    with ExitStack() as stack:

        def use(*, trickles: bool) -> Hub:
            hub = stack.enter_context(run_hub(tmp_path, trickles=trickles))
            for variable, value in hub.environment.items():
                monkeypatch.setenv(variable, value)
            return hub

        yield use


def test_find_model_takes_a_directory_and_rejects_invalid_names_without_the_hub(tmp_path):
    assert find_model(str(tmp_path), None, 60) == tmp_path
    with pytest.raises(ConfigError, match=r"model\.revision = v1 selects .* is a directory; remove it"):
        find_model(str(tmp_path), "v1", 1.0)
    for name, problem in (
        ("./missing", "does not exist"),
        ("a/b/c", "does not exist"),
        ("no such", "is neither a directory"),
    ):
        with pytest.raises(ConfigError, match=rf"tokenizer\.name = {name} {problem}"):
            find_tokenizer(name, "me/model", None, 60)


def test_find_model_downloads_the_files_of_the_revision_once_and_uses_them_offline(use_hub, monkeypatch):
    hub = use_hub(trickles=False)
    description = find_tokenizer(None, "me/model", "v1.2", 60)
    assert [file.name for file in description.iterdir()] == ["config.json"]
    directory = find_model("me/model", "v1.2", 60)
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert directory.name == COMMIT
    assert any(path.startswith("/api/models/me/model/revision/v1.2") for path in hub.requests)
    num_requests = len(hub.requests)
    assert find_model("me/model", "v1.2", 60) == directory
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model_files._download.cache_clear()
    assert find_model("me/model", "v1.2", 60) == directory
    assert len(hub.requests) == num_requests
    with pytest.raises(
        ConfigError, match=r"model\.name = no/model is not a directory and cannot be downloaded"
    ) as error:
        find_model("no/model", None, 60)
    assert "\n" not in str(error.value)


def test_find_model_trickling_download_times_out(use_hub):
    use_hub(trickles=True)
    with pytest.raises(DeadlineError, match=r"waited 1 s for the download of me/model \(model\.download_timeout_s"):
        find_model("me/model", None, 0.6)


def test_download_ends_with_its_process(tmp_path):
    """A killed trainer leaves no process that downloads."""
    code = "from prime_rl.storage.model_files import find_model; find_model('me/model', None, 60)"
    with run_hub(tmp_path) as hub:
        command, environment = [sys.executable, "-c", code], os.environ | hub.environment
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as parent:
            assert hub.is_trickling.wait(60)
            parent.kill()
            parent.stderr.read()  # ends when the child, which has the same stderr, has exited, too
            assert parent.wait() == -signal.SIGKILL


def test_find_model_names_the_process_that_downloads_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    lock = tmp_path / ".locks/prime-rl--some--model.lock"
    lock.parent.mkdir(parents=True)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(DeadlineError, match=rf"process {other.pid} .*, which downloads some/model"):
            find_model("some/model", None, 0.05)
        other.communicate()
