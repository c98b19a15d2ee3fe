"""Requests through proxies, to servers with a private certificate, and to none."""

import errno
import socket
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prime_rl.core import http_requests
from prime_rl.core.http_requests import answers, open_client, send_request

HOST = "server.invalid"


class Server(BaseHTTPRequestHandler):
    """Answers with the target of each request, after a redirect if that is `/old`."""

    def do_GET(self):
        if self.path == "/old":
            self.send_response(307)
            self.send_header("Location", "/new")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(200)
        self.end_headers()
        return self.wfile.write(self.path.encode())

    def log_message(self, *arguments):
        """Write no log."""


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_request_uses_the_proxy_of_the_environment_for_other_machines_and_follows_redirects(server, monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")  # as for Python's own client, only HTTP proxies count
    for scheme in ("", "http://"):
        monkeypatch.setenv("http_proxy", f"{scheme}127.0.0.1:{server.server_port}")
        assert send_request("GET", f"http://{HOST}/x", 5).text == f"http://{HOST}/x"
    assert send_request("GET", f"http://127.0.0.1:{server.server_port}/old", 5).text == "/new"
    monkeypatch.setenv("no_proxy", HOST)
    with pytest.raises(ConnectionError, match=r"Name or service not known|resolution"):
        send_request("GET", f"http://{HOST}/x", 5)


def test_unsupported_proxy_or_invalid_url_is_a_connection_error(monkeypatch):
    for url in ("http://[::1", "http://127.0.0.1:port", "ftp://127.0.0.1", ""):
        with pytest.raises(ConnectionError):
            send_request("GET", url, 5)
    for proxy in ("socks4://127.0.0.1:9", "socks5://127.0.0.1:9"):
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(ConnectionError, match=r"(?i)proxy"):
            send_request("GET", f"http://{HOST}", 5)


def test_refused_connection_has_the_reason_of_the_operating_system(server):
    server.shutdown()
    server.server_close()
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(ConnectionError) as caught:
        send_request("GET", url, 5)
    assert (caught.value.errno, caught.value.strerror) == (errno.ECONNREFUSED, "Connection refused")
    assert not answers(url)


def test_an_exception_that_is_being_handled_is_no_reason_of_a_later_failure():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        try:
            Path("/no/such/file").read_text()
        except FileNotFoundError:
            with pytest.raises(ConnectionError) as caught:
                send_request("GET", f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1)
    assert "timed out" in str(caught.value)


async def test_certificate_of_the_environment_is_trusted(server, tmp_path, monkeypatch):
    files = cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}/x"
    with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        send_request("GET", url, 5)
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    monkeypatch.setattr(http_requests, "_tls_context", http_requests._tls_context.__wrapped__)
    async with open_client() as client:
        assert (await client.get(url)).text == send_request("GET", url, 5).text == "/x"
