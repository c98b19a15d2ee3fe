"""A Hugging Face hub with one small model, whose weights arrive one byte at a time and do not end."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40
_SIZES = {"config.json": 2, "model.safetensors": 1000}


@dataclass
class Hub:
    """State of a hub: the environment variables of its clients, and the paths of the requests so far."""

    trickles: bool
    environment: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    is_trickling: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    hub: "Hub"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def _answer(self, body: bool) -> None:
        self.hub.requests.append(self.path)
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/me/model/tree/"):
            files = [{"type": "file", "path": n, "size": size, "oid": "b" * 40} for n, size in _SIZES.items()]
            data = json.dumps(files).encode()
        elif self.path.startswith("/api/models/me/model"):
            data = json.dumps(
                {"id": "me/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in _SIZES]}
            ).encode()
        elif name in _SIZES:
            data = b"{}" if name == "config.json" else bytes(_SIZES[name])
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self._send(data, name == "model.safetensors" and self.hub.trickles)

    def _send(self, data: bytes, slowly: bool) -> None:
        if not slowly:
            self.wfile.write(data)
            return
        self.hub.is_trickling.set()
        while not self.hub.ended.wait(0.2):  # less than any read time-out
            try:
                self.wfile.write(b"\0")
            except OSError:  # the client has given up
                return


@contextmanager
def run_hub(cache: Path, *, trickles: bool = True) -> Iterator[Hub]:
    """Run a hub for clients that download into `cache`."""
    hub = Hub(trickles)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            server.shutdown()
            thread.join()
