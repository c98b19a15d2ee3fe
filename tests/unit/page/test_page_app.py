"""The routes of the page, over HTTP."""

import asyncio
import hashlib
import json
import re
import threading
from importlib import resources
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.page.page_access import PageAccess
from prime_rl.page.page_app import make_app, run_events
from prime_rl.page.prometheus_export import prometheus_text
from prime_rl.page.run_data import run_health
from prime_rl.page.run_data.run_view import RunView, find_runs
from prime_rl.plots.figure_history import FigureHistory
from prime_rl.plots.loss_surface import LossSurface, write_loss_surface
from prime_rl.storage.paths import RunPaths
from tests.support.synthetic_run import synthetic_run, write_run

LOCAL = PageAccess(None, is_remote=False)
VENDORED = {  # of the npm package uplot 1.6.32
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "synthetic"
    write_run(directory, steps=120)
    return directory


@pytest.fixture
def client(root):
    return TestClient(make_app([RunView("synthetic", root)], LOCAL), base_url="http://127.0.0.1")


def get(client, path, **parameters):
    response = client.get(f"/api/runs/synthetic/{path}", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_overview_has_headline_and_described_metrics(client):
    overview = get(client, "overview")
    headline = overview["headline"]
    assert (headline["steps"], headline["max_steps"], headline["staleness_bound"]) == (120, 150, 2)
    assert headline["eta_seconds"] == pytest.approx(30 * synthetic_run.STEP_SECONDS)
    reward = next(metric for metric in overview["metrics"] if metric["name"] == "orchestrator:reward/mean")
    assert reward["count"] == 120 and "batch" in reward["meaning"]


def test_series_are_decimated_and_unknown_names_omitted(client):
    names = ["trainer:loss", "efficiency:run", "wait_share:trainer", "trainer:none", "x:y", "wait_share:x"]
    series = get(client, "series", metric=names, points=20)["series"]
    assert set(series) == {"trainer:loss", "efficiency:run", "wait_share:trainer"}
    assert len(series["trainer:loss"]["value"]) <= 20 and series["trainer:loss"]["step"][-1] == 119
    assert all(0.5 < value <= 1 for value in series["efficiency:run"]["value"])


def test_rollouts_are_found_and_opened_with_tokens(client):
    page = get(client, "rollouts", reward_from=1, env="math", step_from=119, count=3)
    assert page["num_files"] == page["num_indexed"] == 120
    row = page["rows"][0]
    assert row["env"] == "math" and row["reward"] == 1 and row["staleness"] == 2 and row["preview"]
    detail = get(client, f"rollouts/{row['step']}/{row['group']}/{row['rollout']}")
    assert len(detail["all_rollouts"]) == 8 and [m["role"] for m in detail["messages"]] == ["user", "assistant"]
    [sample] = detail["samples"]
    count = synthetic_run.PROMPT + synthetic_run.COMPLETION
    columns = ("token", "mask", "version", "advantage", "sampler_logprob", "trainer_logprob", "ratio", "entropy")
    assert {len(sample[column]) for column in columns} == {count}
    assert sample["advantage"][-1] == pytest.approx(detail["advantage"], abs=1e-4)
    assert sample["text"] is None and "no tokenizer" in detail["token_note"]


def test_rollout_without_rows_or_trainer_values_says_so(client, root):
    detail = get(client, "rollouts/3/6/0")
    assert detail["samples"] == [] and "rows of batch 3 are deleted" in detail["token_note"]
    train = root / "rollouts/step_118/train.safetensors"
    train.unlink()
    detail = get(client, "rollouts/118/236/0")
    assert "trainer_logprob" not in detail["samples"][0] and "not written" in detail["token_note"]
    (root / "rollouts/step_118/rows.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in get(client, "rollouts/118/236/0")["token_note"]


def test_timeline_has_lanes_waits_and_events(client):
    window = get(client, "timeline", begin=synthetic_run.START, end=synthetic_run.START + 60)
    assert [lane["name"] for lane in window["lanes"]] == ["orchestrator", "inference", "inference_updates", "trainer_0"]
    trainer = window["lanes"][3]
    assert trainer["waits"] == {"orchestrator": pytest.approx(10, abs=1.1)}
    assert trainer["idle_share"] == pytest.approx(1 / 6, abs=0.02)
    whole = get(client, "timeline")
    assert [event["event"] for event in whole["events"]] == ["started"] * 3 + ["restarted", "finished"]
    coarse = get(client, "timeline", pixels=100)["lanes"][3]["spans"]
    assert len(coarse) <= 200 and any(span.get("merged") for span in coarse)


def test_trace_is_a_chrome_trace(client):
    events = json.loads(client.get("/api/runs/synthetic/trace.json").content)
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 10 * 120 and all(event["dur"] > 0 and isinstance(event["ts"], int) for event in spans)
    first = next(event for event in spans if event["name"] == "wait for batch 0")
    assert first["args"] == {"step": 0, "waiting_for": "orchestrator"} and first["cat"] == "wait"


def test_prometheus_parser_reads_the_metrics(client):
    response = client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["prime_rl_step"].samples[0].value == 120
    rewards = {sample.labels["env"]: sample.value for sample in families["prime_rl_reward_mean"].samples}
    assert set(rewards) == {"math", "code", "mean"} - {"mean"} and rewards["math"] > rewards["code"]
    tokens = {sample.labels["role"]: sample.value for sample in families["prime_rl_tokens"].samples}
    assert tokens == {"inference": 30_000 * 120, "trainer": 32_000 * 120}
    waits = {(s.labels["process"], s.labels["waiting_for"]): s.value for s in families["prime_rl_wait_seconds"].samples}
    assert waits["trainer_0", "orchestrator"] == pytest.approx(120, rel=0.01)
    assert {"prime_rl_policy_lag_versions", "prime_rl_mismatch_kl_nats", "prime_rl_switch_seconds"} <= families.keys()


def test_prometheus_age_of_a_heartbeat_does_not_depend_on_the_clock_of_its_host(tmp_path):
    file = RunPaths(tmp_path).heartbeat("trainer_0")
    with HeartbeatWriter(RunPaths(tmp_path), "trainer_0", "trainer"):
        beat = json.loads(file.read_text())
    file.write_text(json.dumps(beat | {"written": beat["written"] - 600}))
    text = prometheus_text([RunView("run", tmp_path)]).decode()
    (age,) = re.findall(r"^prime_rl_heartbeat_age_seconds{.*} (.*)$", text, re.MULTILINE)
    assert float(age) < 300


def test_grafana_dashboard_asks_for_exported_metrics(client):
    exported = set(re.findall(r"^(prime_rl_\w+)", client.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((Path(__file__).parents[3] / "deploy/grafana/prime_rl.json").read_text())
    asked = {name for panel in dashboard["panels"] for name in re.findall(r"prime_rl_\w+", panel["targets"][0]["expr"])}
    assert len(dashboard["panels"]) == 12
    assert asked - {"prime_rl_heartbeat_age_seconds"} <= exported, "a run without processes has no heartbeats"


def test_health_is_that_of_doctor(client):
    health = get(client, "health")
    assert health["state"] == "finished" and health["servers"] == [
        {"name": "inference", "version": 120, "since": pytest.approx(synthetic_run.START + 720)}
    ]


async def collect(view, cursor, last, change=lambda: None):
    """The events until the first one called `last`."""
    events, stream = [], run_events(view, cursor, 0.01)
    async for text in stream:
        if text.startswith(":"):
            change()
            continue
        name, identity, data = (line.partition(": ")[2] for line in text.strip().split("\n"))
        events.append((name, identity, json.loads(data)))
        if name == last:
            break
    await stream.aclose()
    return events


def test_stream_sends_new_lines_from_the_cursor_and_continues(tmp_path):
    paths, view = write_run(tmp_path / "run", steps=3), RunView("run", tmp_path / "run")
    cursor = view.overview()["cursor"]

    def append():
        with paths.metrics("trainer").open("a") as file:
            file.write('{"step": 3, "loss": 0.5, "time": 1}\n{"step": 4, "lo')

    events = asyncio.run(collect(view, cursor, "metrics", append))
    assert [name for name, _, _ in events][:2] == ["headline", "counts"]
    _, new_cursor, rows = events[-1]
    assert rows == [{"process": "trainer", "step": 3, "time": 1, "values": {"loss": 0.5}}]
    assert view.updates(new_cursor) == {"rows": [], "cursor": new_cursor}
    assert view.updates(cursor)["rows"] == rows, "a reconnect repeats what its cursor has not seen"


def test_stream_replaced_file_asks_for_a_reload(tmp_path):
    paths, view = write_run(tmp_path / "run", steps=3), RunView("run", tmp_path / "run")
    cursor = view.overview()["cursor"]
    other = tmp_path / "other"
    other.write_text('{"step": 0, "loss": 0.5}\n')
    other.replace(paths.metrics("trainer"))
    assert asyncio.run(collect(view, cursor, "reload"))[-1][0] == "reload"


def test_empty_directory_is_served(tmp_path):
    client = TestClient(make_app(find_runs([tmp_path / "none"]), LOCAL), base_url="http://localhost")
    assert client.get("/api/runs/none/overview").json()["metrics"] == []
    assert client.get("/api/runs/none/rollouts").json()["num_files"] == 0
    assert client.get("/api/runs/none/timeline").json()["begin"] is None
    assert "contains no run" in client.get("/api/runs/none/health").json()["problems"][0]["text"]
    assert client.get("/api/runs/other/overview").status_code == 404
    assert client.get("/api/runs/none/rollouts/0/0/0").status_code == 404


def test_find_runs_opens_the_runs_below_a_directory(tmp_path):
    for folder in ("a", "b", "deep/a"):
        write_run(tmp_path / folder, steps=1)
    (tmp_path / "notes").mkdir()
    assert [run.name for run in find_runs([tmp_path])] == ["a", "b"]
    assert [run.name for run in find_runs([tmp_path / "a", tmp_path / "deep/a"])] == ["a", "a-2"]


@pytest.mark.parametrize(
    "path", ["/", "/static/style.css", "/static/main.js", "/static/vendor/uPlot.iife.min.js", "/metrics"]
)
def test_every_answer_has_a_strict_policy(client, path):
    response = client.get(path)
    policy = response.headers["content-security-policy"]
    assert response.status_code == 200 and policy.startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in policy and response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/static/../page_app.py", "/static/%2e%2e/page_app.py", "/static/vendor", "/docs", "/openapi.json"]
)
def test_other_files_are_not_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:80", "10.0.0.1"])
def test_loopback_refuses_other_host_names(root, host):
    client = TestClient(make_app([RunView("synthetic", root)], LOCAL), base_url="http://127.0.0.1")
    assert client.get("/api/runs", headers={"host": host}).status_code == 403
    for allowed in ("localhost:8420", "[::1]:80", "127.0.0.1"):
        assert client.get("/api/runs", headers={"host": allowed}).status_code == 200


def test_other_machines_need_the_key(root, monkeypatch):
    monkeypatch.delenv("PAGE_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0.*PAGE_TEST_KEY"):
        PageAccess.for_address("0.0.0.0", "PAGE_TEST_KEY")
    monkeypatch.setenv("PAGE_TEST_KEY", "secret")
    assert PageAccess.for_address("127.0.0.1", "PAGE_TEST_KEY").api_key is None
    access = PageAccess.for_address("0.0.0.0", "PAGE_TEST_KEY")
    client = TestClient(make_app([RunView("synthetic", root)], access), base_url="http://node1", follow_redirects=False)
    assert client.get("/api/runs").status_code == client.get("/metrics").status_code == 401
    assert "password" in client.get("/").text and client.get("/").status_code == 401
    assert client.get("/metrics", headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.post("/login", data={"key": "wrong"}).status_code == 401
    assert client.get("/api/runs").status_code == 401
    answer = client.post("/login", data={"key": "secret"})
    assert answer.status_code == 303 and "secret" not in answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.get("/api/runs").status_code == 200


def test_only_get_is_served(client):
    assert client.post("/api/runs").status_code == 405
    assert client.post("/login", data={"key": "x"}).status_code == 405


def test_vendored_files_are_those_of_the_package():
    folder = resources.files("prime_rl.page") / "static/vendor"
    assert {item.name for item in folder.iterdir()} == {*VENDORED, "uPlot.LICENSE"}
    for name, digest in VENDORED.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert "Permission is hereby granted" in (folder / "uPlot.LICENSE").read_text()


def test_scripts_write_text_only_as_text():
    folder = resources.files("prime_rl.page") / "static"
    for file in folder.iterdir():
        if file.name.endswith(".js"):
            source = file.read_text()
            for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert name not in source, f"{file.name} uses {name}"
            assert "http://" not in source and "https://" not in source, f"{file.name} names another origin"


def test_figures_are_those_of_the_run_with_its_threshold(root, client):
    figures = get(client, "figures")["figures"]
    assert list(figures) == ["reward_landscape", "advantage_distribution", "pass_at_k"]
    assert figures["reward_landscape"]["data"][0]["x"] == list(range(120))
    history = FigureHistory()
    for step in range(120):
        history.add_samples(step, list(map(json.loads, RunPaths(root).samples(step).read_text().splitlines())))
    whole = history.figures()
    assert figures["advantage_distribution"] == whole["advantage_distribution"]
    line = next(trace for trace in figures["pass_at_k"]["data"] if trace.get("name") == "steps 80 to 119")
    assert line["x"] == [1, 2, 4, 8] and line["y"] == pytest.approx(
        next(trace["y"] for trace in whole["pass_at_k"]["data"] if trace.get("name") == "steps 80 to 119")
    )


def test_figures_have_gradient_norms_the_threshold_and_the_loss_surface(tmp_path):
    paths = write_run(tmp_path / "run", steps=4)
    paths.run_toml.write_text("[orchestrator]\npass_threshold = 2.0\n")
    rows = [{"step": step, "grad_norm/layer_0": 1.0, "grad_norm/layer_1": 10.0 + step} for step in range(4)]
    paths.metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_loss_surface(paths, LossSurface([0, 1], [0, 1], [[1, 2], [3, 4]], [(1, 0, 0)]))
    figures = RunView("run", paths.root).figures()
    assert figures["gradient_flow"]["data"][0]["y"] == [0, 1] and figures["gradient_flow"]["data"][0]["x"] == [
        0,
        1,
        2,
        3,
    ]
    assert figures["loss_surface"]["data"][0]["z"] == [[1, 2], [3, 4]]
    assert {tuple(trace["y"]) for trace in figures["pass_at_k"]["data"]} == {(0.0,) * 4}, "no reward reaches 2"


async def test_stream_ends_when_the_server_stops(root):
    closing = []
    stream = run_events(RunView("synthetic", root), "", 0.01, lambda: bool(closing))
    assert (await anext(stream)).startswith("event: reload")
    closing.append(True)
    assert len([event async for event in stream]) <= 3


async def test_stopping_server_waits_for_no_examination(root, monkeypatch):
    started, release = threading.Event(), threading.Event()

    def examine(paths):
        started.set()
        release.wait()
        raise OSError

    monkeypatch.setattr(run_health, "examine", examine)
    app = make_app([RunView("synthetic", root)], LOCAL, is_closing=started.is_set)
    transport = ASGITransport(app)
    async with AsyncClient(transport=transport, base_url="http://127.0.0.1") as client, asyncio.timeout(120):
        answer = await client.get("/api/runs/synthetic/health")
    release.set()
    assert (answer.status_code, answer.json()["detail"]) == (503, "the page ends")
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "health")
