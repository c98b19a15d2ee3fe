"""`PolicyClient` against a real HTTP server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prime_rl.api.policy_client import PolicyClient
from prime_rl.core.errors import RunError
from prime_rl.core.http_requests import answers


class Server(BaseHTTPRequestHandler):
    """Answers as an OpenAI-compatible server does: replies count up, and a request for `tokens` is refused."""

    def do_GET(self):
        self._answer(200, {"data": [{"id": "policy"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["key"] = self.headers.get("Authorization")
        self.server.bodies.append(body)
        if body.get("max_tokens") == 0:
            return self._answer(400, {"error": "max_tokens must\nbe at least 1"})
        replies = [{"message": {"content": f"reply {index}"}} for index in range(body["n"])]
        return self._answer(200, {"choices": replies})

    def _answer(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments):
        """Write no log."""


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.bodies = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_server_of_this_machine_needs_no_proxy(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert PolicyClient(server.url).generate("hello") == ["reply 0"]
    assert answers(f"{server.url}/health")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_generate_returns_one_text_per_sample(server, suffix, monkeypatch):
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", "secret")
    messages = [{"role": "user", "content": "hello"}]
    client = PolicyClient(server.url + suffix)
    assert client.generate(messages, num_samples=4, temperature=0.5) == [f"reply {index}" for index in range(4)]
    client.generate("hello")
    first, second = server.bodies
    assert first == {"model": "policy", "messages": messages, "n": 4, "temperature": 0.5, "key": "Bearer secret"}
    assert second["messages"] == messages


def test_generate_refused_request_or_missing_server_is_a_run_error_of_one_line(server):
    client = PolicyClient(server.url, model="policy")
    with pytest.raises(RunError, match=r"/v1/chat/completions answered 400: .*max_tokens must") as caught:
        client.generate("hello", max_tokens=0)
    assert "\n" not in str(caught.value)
    server.shutdown()
    server.server_close()
    with pytest.raises(RunError, match=r"cannot be reached: .*refused"):
        client.generate("hello")
