"""The chat of the page: only with a server of the run, and only from the page itself."""

from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.testclient import TestClient
from tests.support.browser import CHROMIUM, WatchedTab
from tests.support.policy_server import policy_server
from tests.support.tiny_model import publish_weights

from prime_rl_page.page_access import PageAccess
from prime_rl_page.page_app import make_app
from prime_rl_page.run_data.run_view import RunList

ORIGIN = {"origin": "http://127.0.0.1"}
MESSAGES = [{"role": "user", "content": "one"}]


@pytest.fixture
def run(tmp_path):
    model = tmp_path / "model"
    model.mkdir()

    save_file({"a": np.zeros(2, np.float32)}, model / "model.safetensors")
    publish_weights(tmp_path / "run", model, 4)
    return tmp_path / "run"


@pytest.fixture
def client(run):
    return TestClient(make_app(RunList([run]), PageAccess(None, is_remote=False)), base_url="http://127.0.0.1")


def test_chat_streams_the_reply_of_the_served_version(run, client):
    with policy_server(run, 4) as server:
        assert client.get("/api/runs/run/chat").json() == {"step": 4}
        answer = client.post("/api/runs/run/chat", json=MESSAGES, headers=ORIGIN)
    assert (answer.status_code, answer.headers["x-policy-step"]) == (200, "4")
    assert answer.text == "".join(server.parts) and answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff" and "script-src 'self'" in str(answer.headers)
    assert server.requests[0]["messages"] == MESSAGES


def test_chat_without_a_server_is_refused(run, client):
    with policy_server(run, 4) as server:
        server.policy["hash"] = "of another run"
        assert client.get("/api/runs/run/chat").json() == {"step": None}
    answer = client.post("/api/runs/run/chat", json=MESSAGES, headers=ORIGIN)
    assert answer.status_code == 409 and "does not run" in answer.json()["detail"]


def test_chat_from_elsewhere_or_malformed_is_refused(run, client):
    with policy_server(run, 4) as server:
        for body, headers, status in (
            (MESSAGES, {"origin": "http://evil.example"}, 403),
            (MESSAGES, {**ORIGIN, "content-type": "text/plain"}, 415),
            (MESSAGES, {**ORIGIN, "host": "evil.example"}, 403),
            (MESSAGES, {"origin": "http://evil.example", "host": "evil.example"}, 403),
            ([], ORIGIN, 422),
            ([{"role": "system", "content": "x"}], ORIGIN, 422),
        ):
            assert client.post("/api/runs/run/chat", json=body, headers=headers).status_code == status, (body, headers)
    assert not server.requests


@pytest.mark.extended
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install --no-install-recommends chromium")
def test_chat_view_shows_replies_as_text_and_ends_with_the_server(run, browser, page_process):
    tab = WatchedTab(browser)
    page = tab.page
    with page_process(run) as (_, url):
        with policy_server(run, 4) as server:
            markup = ("<img src=x onerror='window.hacked = 1'>", "<script>window.hacked = 2</script>")
            server.parts = [markup[0], "\u202eb\x1b[31m", markup[1]]
            page.goto(f"{url}#view=chat")
            page.get_by_text("samples from step 4").wait_for()
            page.get_by_label("message").fill("<b>one</b>")
            page.get_by_role("button", name="Send").click()
            page.get_by_text("window.hacked = 2").wait_for()
            assert "[U+202E]b␛[31m" in page.get_by_role("log").inner_text()
            assert page.locator("[role=log] img, [role=log] script").count() == 0
        page.get_by_text("The server of the run does not run").wait_for()
        assert page.get_by_role("button", name="Send").is_disabled()
        tab.check(("http", urlsplit(url).netloc))
