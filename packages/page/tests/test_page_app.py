"""The routes of the page, over HTTP."""

import asyncio
import hashlib
import json
import re
import shutil
import threading
import time
import tomllib
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.support.synthetic_run import synthetic_run, write_run

from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors import Monitor
from prime_rl.monitors.figures import FigureHistory
from prime_rl.storage.batch import keep_shown_tokens
from prime_rl.storage.paths import RunPaths
from prime_rl_page.loss_surface import LossSurface, write_loss_surface
from prime_rl_page.page_access import PageAccess
from prime_rl_page.page_app import make_app, prometheus_text, run_events
from prime_rl_page.run_data import run_health, run_view
from prime_rl_page.run_data.rollout_detail import text_changes
from prime_rl_page.run_data.run_view import RunList, RunView

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
    return TestClient(make_app(RunList([root]), LOCAL), base_url="http://127.0.0.1")


def write_rows(file, rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def get(client, path, **parameters):
    response = client.get(f"/api/runs/synthetic/{path}", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_overview_has_headline_described_metrics_and_the_health_of_doctor(client):
    overview = get(client, "overview")
    headline = overview["headline"]
    assert (headline["steps"], headline["max_steps"], headline["staleness_bound"]) == (120, 150, 2)
    assert headline["eta_seconds"] == pytest.approx(30 * synthetic_run.STEP_SECONDS)
    reward = next(metric for metric in overview["metrics"] if metric["name"] == "orchestrator:reward/mean")
    assert reward["count"] == 120 and "batch" in reward["meaning"]
    health = get(client, "health")
    server = {"name": "inference", "version": 120, "since": pytest.approx(synthetic_run.START + 720)}
    assert health["state"] == "finished" and health["servers"] == [server]


def test_settings_are_those_of_the_run_without_secrets(tmp_path):
    text = """max_steps = 7
[inference.vllm]
api_key = "s1"
[orchestrator]
headers = {"X-Api-Key" = "s2", Authorization = "s3"}
[orchestrator.client]
api_key_var = "SHOWN"
base_url = ["http://me:s4@host:1"]
[[orchestrator.env]]
id = "x"
args = {judge = {auth_token = "s5"}, token = "s6"}
"""
    RunPaths(tmp_path / "run").root.mkdir()
    RunPaths(tmp_path / "run").run_toml.write_text(text)
    view = RunView("run", tmp_path / "run")
    shown = view.settings_text()
    hidden = "(hidden)"
    args = {"judge": {"auth_token": hidden}, "token": hidden}
    assert (
        tomllib.loads(shown)
        == view.settings()
        == {
            "max_steps": 7,
            "inference": {"vllm": {"api_key": hidden}},
            "orchestrator": {
                "headers": {"X-Api-Key": hidden, "Authorization": hidden},
                "client": {"api_key_var": "SHOWN", "base_url": [hidden]},
                "env": [{"id": "x", "args": args}],
            },
        }
    )
    client = TestClient(make_app(RunList([tmp_path / "run"]), LOCAL), base_url="http://127.0.0.1")
    assert client.get("/api/runs/run/settings").json() == {"text": shown}


def test_series_are_decimated_and_unknown_names_omitted(client):
    names = ["trainer:loss", "efficiency:run", "wait_share:trainer", "trainer:none", "x:y", "wait_share:x"]
    series = get(client, "series", metric=names, points=20)["series"]
    assert set(series) == {"trainer:loss", "efficiency:run", "wait_share:trainer"}
    assert len(series["trainer:loss"]["value"]) <= 20 and series["trainer:loss"]["step"][-1] == 119
    assert all(0.5 < value <= 1 for value in series["efficiency:run"]["value"])


def test_headline_rates_are_those_of_the_recent_steps_together(tmp_path):
    """1,000 tokens in one second and 900 in nine are 190 per second, and not the mean of 1,000 and 100."""
    paths = RunPaths(tmp_path)
    for process, seconds in (("trainer", "time/train"), ("orchestrator", "time/step")):
        rates = [(0, 1000, 1), (1, 100, 9)]
        rows = [{"step": step, "perf/tokens_per_second": rate, seconds: time} for step, rate, time in rates]
        write_rows(paths.metrics(process), rows)
    headline = RunView("x", tmp_path).overview()["headline"]
    assert headline["tokens_per_second"] == headline["trained_tokens_per_second"] == pytest.approx(190)
    (tmp_path / "empty").mkdir()
    assert RunView("y", tmp_path / "empty").overview()["headline"]["tokens_per_second"] is None


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


def test_rollout_of_an_old_step_has_the_tokens_that_were_kept(tmp_path):
    paths, view = write_run(tmp_path / "run", steps=3), RunView("run", tmp_path / "run")
    whole = view.rollout(2, 4, 3)
    keep_shown_tokens(paths.rollouts(2))
    for name in ("rows.safetensors", "train.safetensors"):
        (paths.rollouts(2) / name).unlink()
    assert view.rollout(2, 4, 3) == whole and whole["samples"][0]["trainer_logprob"]


def test_history_has_the_replies_to_one_prompt_and_their_changes(tmp_path):
    paths = write_run(tmp_path / "run", steps=3)
    for step, text in enumerate(["the sum is 5", "the <b>sum</b> is 6", "the <b>sum</b> is 7"]):
        rows = [json.loads(line) for line in paths.samples(step).read_text().splitlines()]
        rows[0] |= {"example": 7, "reward": step / 2}
        rows[0]["messages"][1]["content"] = text
        write_rows(paths.samples(step), rows)
    view = RunView("run", tmp_path / "run")
    group = json.loads(paths.samples(2).read_text().splitlines()[0])["group_id"]
    own = [row for row in view.history(2, group, 0) if row["group"] % 2 == group % 2]
    assert [row["step"] for row in own] == [0, 1, 2] and [row["mean_reward"] for row in own] == [0, 0.5, 1]
    assert own[1]["changes"] == [
        ("same", "the "), ("removed", "sum "), ("added", "<b>sum</b> "), ("same", "is "),
        ("removed", "5"), ("added", "6"),
    ]  # fmt: skip
    assert view.history(2, group, 99) == []


def test_text_changes_of_long_repetitive_replies_end_soon():
    old, new = "a b " * 5000, "b a " * 5000
    begin = time.process_time()
    assert "".join(text for kind, text in text_changes(old, new) if kind != "removed") == new
    assert time.process_time() - begin < 5


NOTE = {"step": 5, "group": 10, "rollout": 1}


def test_notes_are_kept_with_their_rollout_and_removed(tmp_path):
    paths = write_run(tmp_path / "synthetic", steps=6)
    client = TestClient(make_app(RunList([paths.root]), LOCAL), base_url="http://127.0.0.1")
    url = "/api/runs/synthetic/notes"
    assert client.get(f"{url}.jsonl").content == b""
    assert client.post(url, json={**NOTE, "text": "wrong \u2028 answer"}).status_code == 204
    assert client.post(url, json={**NOTE, "rollout": 2, "is_flagged": True}).status_code == 204
    assert get(client, "rollouts/5/10/1")["note"] == {"is_flagged": False, "text": "wrong \u2028 answer"}
    found = get(client, "rollouts", noted=True)
    assert [row["rollout"] for row in found["rows"]] == [1, 2] and found["num_matching"] == 2
    paths.samples(5).unlink()
    again = TestClient(make_app(RunList([paths.root]), LOCAL), base_url="http://127.0.0.1")
    rows = [json.loads(line) for line in again.get(f"{url}.jsonl").content.splitlines()]
    assert [row["sample"]["rollout"] for row in rows] == [1, 2] and rows[0]["text"] == "wrong \u2028 answer"
    assert again.post(url, json=NOTE).status_code == 204
    assert len(again.get(f"{url}.jsonl").content.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"json": {**NOTE, "rollout": 99, "text": "x"}}, 404),
        ({"json": {**NOTE, "text": "x" * 4001}}, 422),
        ({"content": json.dumps({**NOTE, "text": "x"}), "headers": {"content-type": "text/plain"}}, 415),
        ({"json": {**NOTE, "text": "x"}, "headers": {"origin": "http://evil.example"}}, 403),
        ({"json": {**NOTE, "text": "x", "more": "x" * 70_000}}, 413),
    ],
    ids=["no rollout", "long text", "form", "other site", "long body"],
)
def test_note_that_is_refused_writes_nothing(client, root, options, status):
    assert client.post("/api/runs/synthetic/notes", **options).status_code == status
    assert not (root / "samples/notes.jsonl").exists()


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


def test_timeline_counts_waits_in_the_steps_of_the_bottleneck(tmp_path):
    view = RunView("run", write_run(tmp_path / "run", steps=40).root)
    whole = view.timeline(None, None, 1000)
    assert whole["counted"] == (whole["first"], whole["last"]), "not examined yet"
    counted = view.read_health()["bottleneck_window"]
    found = view.timeline(None, None, 1000)
    assert found["counted"] == counted and found["begin"] == whole["first"] < counted[0] < counted[1] <= found["last"]
    assert found["lanes"][3]["covered_seconds"] <= counted[1] - counted[0]
    assert view.timeline(counted[0], None, 1000)["counted"] == (counted[0], whole["last"])


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


def test_headline_has_what_each_process_does_until_the_first_step_and_the_findings_of_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.supervisor.doctor.diagnosis._OBSERVE_INTERVAL_SECONDS", 0.1)
    paths, view = RunPaths(tmp_path), RunView("x", tmp_path)
    heartbeat = HeartbeatWriter(paths, "trainer_0", "trainer")
    heartbeat.enter_imports("torch")
    with heartbeat:
        [activity] = view.headline()["activities"]
        assert (activity["who"], activity["phase"]) == ("trainer_0", "import torch") and activity["seconds"] >= 0
        for role, wait in (("trainer", {"time/wait_for_batch": 4.0}), ("orchestrator", {"time/wait_for_policy": 0.0})):
            rows = [{"step": n, "time": 5.0 * n, "time/step": 5.0, "reward/mean": 0.0, "batch/zero_advantage_groups": 1,
                     "reward/std": 0, **wait} for n in range(9)]  # fmt: skip
            write_rows(paths.metrics(role), rows)
        view.refresh()
        view.read_health()
        headline = view.headline()
        resumed = {"time": time.time(), "event": "started", "name": "trainer", "pid": 1}
        paths.events.write_text(json.dumps(resumed) + "\n")
        assert [one["who"] for one in view.headline()["activities"]] == ["trainer_0"]
    assert headline["activities"] == []
    assert headline["bottleneck"].startswith("inference is the bottleneck: the trainer waited 80%")
    assert "all rewards are 0" in headline["findings"][0]


def test_headline_of_a_failed_run_has_its_first_problem(tmp_path):
    paths, view = write_run(tmp_path / "run", steps=3), RunView("run", tmp_path / "run")
    with paths.events.open("a") as file:
        event = {"time": synthetic_run.START + 99, "event": "failed", "name": "rl", "role": "rl"}
        file.write(json.dumps({**event, "detail": "trainer: CUDA out of memory"}) + "\n")
    assert view.headline()["problem"] is None, "not examined yet"
    view.health.read()
    headline = view.headline()
    assert headline["state"] == "failed" and "CUDA out of memory" in headline["problem"]["text"]
    assert headline["problem"]["num_others"] == len(view.read_health()["problems"]) - 1


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
    client = TestClient(make_app(RunList([tmp_path / "none"]), LOCAL), base_url="http://localhost")
    assert client.get("/api/runs/none/overview").json()["metrics"] == []
    assert client.get("/api/runs/none/rollouts").json()["num_files"] == 0
    assert client.get("/api/runs/none/timeline").json()["begin"] is None
    assert "contains no run" in client.get("/api/runs/none/health").json()["problems"][0]["text"]
    assert client.get("/api/runs/other/overview").status_code == 404
    assert client.get("/api/runs/none/rollouts/0/0/0").status_code == 404


def test_run_list_of_a_directory_has_the_runs_below_it(tmp_path):
    for folder in ("a", "b", "deep/a"):
        write_run(tmp_path / folder, steps=1)
    (tmp_path / "notes").mkdir()
    assert [run.name for run in RunList([tmp_path]).read()] == ["a", "b"]
    same = RunList([tmp_path / "a", tmp_path / "b", tmp_path / "deep/a"]).read()
    assert [run.name for run in same] == ["a", "b", "a-2"]
    assert [run.label for run in same] == [f"{tmp_path.name}/a", "b", "deep/a"]
    assert [run.label for run in RunList([tmp_path / "a", tmp_path / "a"]).read()] == ["a"]
    write_run(tmp_path / "a/outputs", steps=1)
    [alone] = RunList([tmp_path / "a/outputs"]).read()
    assert (alone.name, alone.label) == ("outputs", "a/outputs")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The directory of a trainer of several runs, with one run, and a function that starts another one."""
    monkeypatch.setattr(run_view, "_LOOK_SECONDS", 0.0)
    root = tmp_path / "shared"
    with ExitStack() as stack:

        def start(name):
            write_run(root / name, steps=5)
            return stack.enter_context(HeartbeatWriter(RunPaths(root / name), "trainer_0", "trainer"))

        trainer = HeartbeatWriter(RunPaths(root), "trainer_0", "trainer", settings={"max_concurrent_runs": 2})
        stack.enter_context(trainer)
        monitor = Monitor(RunPaths(root), "trainer", None)
        monitor.log(8, {"runs/active": 1, "runs/waiting": 0, "runs/in_iteration": 1, "tokens": 500, "time/step": 0.5})
        monitor.close()
        start("run_beta")
        yield root, start


def test_run_list_of_a_shared_trainer_has_it_and_its_runs_also_later_ones(shared):
    root, start = shared
    runs = RunList([root])
    assert [(run["name"], run["is_trainer"]) for run in runs.describe()] == [("shared", True), ("run_beta", False)]
    view = runs.find("run_beta")
    (root / "run_late/configs").mkdir(parents=True)
    assert len(runs.read()) == 2, "its orchestrator has not announced it"
    start("run_alpha")
    assert [run.label for run in runs.read()] == ["shared (trainer)", "run_beta", "run_alpha"]
    assert runs.find("run_beta") is view
    RunPaths(root).heartbeat("trainer_0").rename(root / "hidden")  # the next start of the trainer removes it
    assert [run.label for run in runs.read()] == ["shared (trainer)", "run_beta", "run_alpha"]
    (root / "hidden").rename(RunPaths(root).heartbeat("trainer_0"))
    shutil.rmtree(root / "run_alpha")
    assert runs.find("run_alpha") is None
    assert [run.name for run in RunList([root.parent]).read()] == ["shared", "run_beta"]


async def test_stream_tells_which_runs_there_are(shared):
    root, start = shared
    runs, found = RunList([root]), []
    view = runs.find("shared")
    async for event in run_events(view, view.overview()["cursor"], 0.01, describe_runs=runs.describe):
        if event.startswith("event: runs\n"):
            found.append([run["name"] for run in json.loads(event.partition("data: ")[2])])
            if len(found) == 2:
                break
            start("run_alpha")
    assert found == [["shared", "run_beta"], ["shared", "run_beta", "run_alpha"]]


def test_totals_of_a_shared_trainer_are_described_and_its_own(shared):
    view = RunList([shared[0]]).find("shared")
    (shared[0] / "run.toml").write_text("max_steps = 5\n")  # of the runs
    overview = view.overview()
    assert (overview["headline"]["steps"], overview["headline"]["max_steps"]) == (9, None)
    assert (overview["headline"]["runs_active"], overview["headline"]["runs_waiting"]) == (1, 0)
    assert all(metric["meaning"] for metric in overview["metrics"]), "all are declared"
    assert RunList([shared[0]]).find("run_beta").overview()["headline"]["runs_active"] is None


def test_prometheus_series_of_a_run_end_when_it_leaves_its_trainer(shared):
    root, start = shared
    runs, leaving = RunList([root]), start("run_alpha")

    def exported():
        text = prometheus_text(runs.read()).decode()
        assert 'prime_rl_runs_active{run="shared"} 1.0' in text
        return {run for run in ("run_alpha", "run_beta") if f'run="{run}"' in text}

    assert exported() == {"run_alpha", "run_beta"}
    leaving.close()
    assert exported() == {"run_beta"}
    alone = prometheus_text(RunList([root / "run_alpha"]).read()).decode()
    assert 'prime_rl_learning_rate{run="run_alpha"}' in alone, "opened as a single run, it keeps its last values"


def test_every_answer_has_a_strict_policy_and_other_files_or_methods_are_refused(client):
    for path in ("/", "/static/style.css", "/static/main.js", "/static/vendor/uPlot.iife.min.js", "/metrics"):
        response = client.get(path)
        policy = response.headers["content-security-policy"]
        assert response.status_code == 200 and policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy and response.headers["x-content-type-options"] == "nosniff"
    for path in ("/static/../page_app.py", "/static/%2e%2e/page_app.py", "/static/vendor", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 404
    assert client.post("/api/runs").status_code == 405
    assert client.post("/login", data={"key": "x"}).status_code == 405


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:80", "10.0.0.1"])
def test_loopback_refuses_other_host_names(root, host):
    client = TestClient(make_app(RunList([root]), LOCAL), base_url="http://127.0.0.1")
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
    client = TestClient(make_app(RunList([root]), access), base_url="http://node1", follow_redirects=False)
    assert client.get("/api/runs").status_code == client.get("/metrics").status_code == 401
    assert client.post("/api/runs/synthetic/notes", json={**NOTE, "text": "x"}).status_code == 401
    assert "password" in client.get("/").text and client.get("/").status_code == 401
    assert client.get("/metrics", headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.post("/login", data={"key": "wrong"}).status_code == 401
    assert client.get("/api/runs").status_code == 401
    answer = client.post("/login", data={"key": "secret"})
    assert answer.status_code == 303 and "secret" not in answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.get("/api/runs").status_code == 200


def test_vendored_files_are_those_of_the_package():
    folder = resources.files("prime_rl_page") / "static/vendor"
    assert {item.name for item in folder.iterdir()} == {*VENDORED, "uPlot.LICENSE"}
    for name, digest in VENDORED.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert "Permission is hereby granted" in (folder / "uPlot.LICENSE").read_text()


def test_scripts_write_text_only_as_text():
    folder = resources.files("prime_rl_page") / "static"
    for file in folder.iterdir():
        if file.name.endswith(".js"):
            source = file.read_text()
            for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert name not in source, f"{file.name} uses {name}"
            assert "http://" not in source and "https://" not in source, f"{file.name} names another origin"


def test_figures_are_those_of_the_run_with_its_threshold_and_loss_surface(tmp_path):
    paths = write_run(tmp_path / "run", steps=4)
    paths.run_toml.write_text("[orchestrator]\npass_threshold = 2.0\n")
    rows = [{"step": step, "grad_norm/layer_0": 1.0, "grad_norm/layer_1": 10.0 + step} for step in range(4)]
    write_rows(paths.metrics("trainer"), rows)
    write_loss_surface(paths, LossSurface([0, 1], [0, 1], [[1, 2], [3, 4]], [(1, 0, 0)]))
    figures = RunView("run", paths.root).figures()
    assert figures["gradient_flow"]["data"][0]["y"] == [0, 1]
    assert figures["gradient_flow"]["data"][0]["x"] == figures["reward_landscape"]["data"][0]["x"] == [0, 1, 2, 3]
    assert figures["loss_surface"]["data"][0]["z"] == [[1, 2], [3, 4]]
    assert {tuple(trace["y"]) for trace in figures["pass_at_k"]["data"]} == {(0.0,) * 4}, "no reward reaches 2"
    history = FigureHistory()
    for step in range(4):
        history.add_samples(step, list(map(json.loads, paths.samples(step).read_text().splitlines())))
    assert figures["advantage_distribution"] == history.figures()["advantage_distribution"]


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
    app = make_app(RunList([root]), LOCAL, is_closing=started.is_set)
    transport = ASGITransport(app)
    async with AsyncClient(transport=transport, base_url="http://127.0.0.1") as client, asyncio.timeout(120):
        answer = await client.get("/api/runs/synthetic/health")
    release.set()
    assert (answer.status_code, answer.json()["detail"]) == (503, "the page ends")
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "health")
