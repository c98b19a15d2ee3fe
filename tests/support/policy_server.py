"""A stand-in for the server of a run: `/policy`, and chat completions that are streamed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class PolicyServer(ThreadingHTTPServer):
    """Serves `policy` and answers with `parts`; `requests` are the bodies of the chat requests."""

    policy: dict[str, Any]
    parts: list[str]
    requests: list[dict[str, Any]]

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: PolicyServer

    def do_GET(self) -> None:
        self._send(json.dumps(self.server.policy if self.path == "/policy" else {"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        events = [json.dumps({"choices": [{"delta": {"content": part}}]}) for part in self.server.parts]
        self._send("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def policy_server(run: Path, step: int) -> Iterator[PolicyServer]:
    """Serve the published version `step` of a run, whose configuration names the server."""
    manifest = json.loads((run / f"weights/step_{step}/manifest.json").read_text())
    server = PolicyServer(("127.0.0.1", 0), _Handler)
    server.policy = {"step": step, "branch": 0, "hash": manifest["hash"]}
    server.parts, server.requests = ["ab", "c\x1b[2J", "<b>"], []
    config = run / "configs/orchestrator.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    settings = [
        f'output_dir = "{run}"\n[model]\nname = "m"\n[client]\nbase_url = ["{server.url}"]\n',
        '[sampling]\nmax_tokens = 8\n[[env]]\nid = "reverse_text"\nargs = { words = 50 }\n',
    ]
    config.write_text("".join(settings))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
