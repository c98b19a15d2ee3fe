"""`export`: which version it takes, what it refuses, that its folder is whole or absent, and the push to the hub."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import prime_rl.entrypoints.delivery.policy_export as policy_export
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.entrypoints.delivery.policy_export import ExportForm, export_policy
from prime_rl.storage.artifact import publish_artifact
from tests.support.adapters import make_adapter, publish_adapter
from tests.support.tiny_model import publish_weights

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"
TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def run(tmp_path):
    """A run whose newest version is not in files, and whose folder of versions has one that is being written."""
    paths = tmp_path / "run"
    for step in (2, 10):
        publish_weights(paths, MODEL, step)
    publish_artifact(paths / "weights/step_11", lambda _: {"format": "prime_rl.weights/1", "branch": 0, "step": 11})
    (paths / "weights/step_12").mkdir()
    return paths


def push(run, target, hub, repository="me/policy", **changed):
    """Run the command in a new process, because `huggingface_hub` reads the variables once."""
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"} | changed
    command = [sys.executable, "-m", "prime_rl.entrypoints.export", str(run), str(target), "--push", repository]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


def test_export_takes_the_newest_version_that_is_in_files(run, tmp_path):
    assert export_policy(run, tmp_path / "new").version.step == 10
    assert (tmp_path / "new/model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert {entry.name for entry in (tmp_path / "new").iterdir()} >= {"README.md", "chat_template.jinja", "config.json"}
    assert not (tmp_path / "new/manifest.json").exists()
    assert export_policy(run, tmp_path / "old", 2).version.step == 2


@pytest.mark.parametrize(
    ("place", "step", "form", "message"),
    [
        ("run", 5, {}, r"no weights of step 5: .*available steps: 2, 10, 11, 12$"),
        ("run", 11, {}, "step_11 has no files of weights: they were sent through memory"),
        ("run", 10, {"adapter": True}, "--adapter: .*step_10 is a whole model"),
        ("run", 10, {"model": "none"}, "--model: .*step_10 is a whole model, which needs no base model; omit"),
        ("run/weights/step_2", 2, {}, "--step selects a version of a run"),
        ("run/weights/step_2", None, {"dtype": "float16"}, "--dtype: .* is in float32"),
        ("none", None, {}, "none is no directory; pass a run directory"),
        ("several", None, {}, "several is a trainer of several runs; pass one of them: run_a, run_b$"),
    ],
)
def test_export_of_what_is_not_there_is_one_line(run, tmp_path, place, step, form, message):
    for name in ("run_a", "run_b"):
        (tmp_path / "several" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        export_policy(tmp_path / place, tmp_path / "out", step, ExportForm(**form))
    assert not (tmp_path / "out").exists()


def test_export_of_a_damaged_version_or_over_a_folder_writes_nothing(run, tmp_path):
    file = run / "weights/step_10/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match="is not what was published"):
        export_policy(run, tmp_path / "out", 10)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    with pytest.raises(ConfigError, match="exists already"):
        export_policy(run, run)


def test_killed_export_leaves_no_target(run, tmp_path):
    code = (
        "import os, sys, prime_rl.entrypoints.delivery.policy_export as export\n"
        "export.write_card = lambda *_: os.kill(os.getpid(), 9)\n"
        f"export.export_policy(export.Path({str(run)!r}), export.Path({str(tmp_path / 'out')!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert export_policy(run, tmp_path / "out").version.step == 10


def test_adapter_is_merged_into_the_revision_that_was_trained(tmp_path, monkeypatch):
    adapter, wanted = make_adapter(tmp_path / "adapter", MODEL, 0), []
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "a/b", "revision": "c"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    publish_adapter(tmp_path / "lora", adapter, 3)
    monkeypatch.setattr(policy_export, "find_model", lambda *base: wanted.append(base[:2]) or MODEL)
    for name, form in (("out", ExportForm()), ("moved", ExportForm(model="d"))):
        export_policy(tmp_path / "lora", tmp_path / name, form=form)
    assert wanted == [("a/b", "c"), ("d", None)]


class StandInHub(BaseHTTPRequestHandler):
    """The hub's routes that an upload uses; it keeps the requests and the files of the commit."""

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.answer({"name": "me"} if known else {"error": "Invalid token"}, 200 if known else 401)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or self.read_chunks()
        hub = self.server
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer({"url": f"{hub.url}/me/policy", "name": "me/policy"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in self.path and not hub.is_full:
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{hub.url}/me/policy/commit/0", "commitOid": "0" * 40, "success": True})
        elif "validate-yaml" in self.path:
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({"error": f"no space left for {self.headers['Authorization']}"}, 507)

    def read_chunks(self):
        body = b""
        while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
    server.url, server.created, server.files = f"http://127.0.0.1:{server.server_port}", [], {}
    server.is_full = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_push_uploads_the_folder_to_a_private_repository(run, hub, tmp_path):
    done = push(run, tmp_path / "out", hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"pushed to {hub.url}/me/policy\n")
    assert hub.created == [{"name": "policy", "organization": "me", "visibility": "private"}]
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.extended
def test_push_that_fails_is_one_line_without_the_token(run, hub, tmp_path):
    for changed, message in (
        ({"repository": "a b"}, "error: --push a b: "),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_TOKEN": "hf_wrong"}, "does not accept the token"),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "http://127.0.0.1:1 "),
    ):
        refused = push(run, tmp_path / "out", hub, **changed)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
        assert refused.stderr.count("\n") == 1 and not re.search("hf_(secret|wrong)", refused.stderr)
        assert not (tmp_path / "out").exists(), "refused before anything is written"
    hub.is_full = True
    failed = push(run, tmp_path / "out", hub)
    assert failed.returncode == 1 and "hf upload me/policy" in failed.stderr and TOKEN not in failed.stderr
    assert (tmp_path / "out/model.safetensors").exists()
