"""The report: one file without other origins, within its budget."""

import base64
import gzip
import hashlib
import json
import re

import pytest
from tests.support.synthetic_run import write_run

from prime_rl_page import __main__ as page_command
from prime_rl_page.page_report import bundle_modules, make_report
from prime_rl_page.run_data.run_view import RunView


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "a <b>"
    write_run(root, steps=60)
    return RunView(root.name, root)


def data_of(text):
    data = re.search(r'id="report-data">([^<]*)<', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(data)))["answers"]


def test_report_contains_curves_timeline_and_sampled_rollouts(view):
    text = make_report(view)
    answers = data_of(text)
    base = "runs/a%20%3Cb%3E"
    assert answers[f"{base}/overview"]["headline"]["steps"] == 60
    assert len(answers[f"{base}/series"]["series"]["trainer:loss"]["value"]) == 60
    assert answers[f"{base}/overview"]["headline"]["bottleneck"] == answers[f"{base}/health"]["bottleneck"] is not None
    assert answers[f"{base}/timeline"]["has_phases"] and answers[f"{base}/health"]["state"] == "finished"
    rows = answers[f"{base}/rollouts"]["rows"]
    assert {row["env"] for row in rows} == {"math", "code"} and max(row["step"] for row in rows) == 59
    for row in rows:
        detail = answers[f"{base}/rollouts/{row['step']}/{row['group']}/{row['rollout']}"]
        assert detail["reward"] == row["reward"] and row["search"] == row["search"].lower()
    assert answers[f"{base}/rollouts/59/118/{rows[0]['rollout']}"]["samples"], "rows of the newest step exist"
    assert "<title>a &lt;b&gt;" in text


def test_report_contains_example_and_answer(tmp_path):
    paths = write_run(tmp_path / "run", steps=2)
    rows = [json.loads(line) | {"example": 3, "answer": "<b>"} for line in paths.samples(1).read_text().splitlines()]
    paths.samples(1).write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = data_of(make_report(RunView("run", paths.root)))
    details = [value for path, value in answers.items() if path.count("/") == 5]
    found = {(detail["step"], detail["example"], detail["answer"]) for detail in details}
    assert found == {(1, 3, "<b>"), (0, 0, None), (0, 1, None)}


def test_report_budget_limits_the_rollouts(view):
    whole = make_report(view)
    data = re.search(r'id="report-data">([^<]*)<', whole)[1]
    base = len(whole.encode()) - len(data)
    small = make_report(view, base + 45_000)
    assert len(small.encode()) <= base + 45_000 < len(whole.encode())
    fewer, all_ = (len([path for path in data_of(text) if path.count("/") == 5]) for text in (small, whole))
    assert 0 < fewer < all_


def test_report_policy_allows_exactly_its_scripts_and_style(view):
    text = make_report(view)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    found = {base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in scripts + styles}
    assert set(re.findall(r"sha256-([^']+)", policy)) == found and len(scripts) == 2
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_page_command_writes_report_and_trace(view, tmp_path, monkeypatch, capsys):
    for option, name in (("--report", "run.html"), ("--trace", "trace.json")):
        monkeypatch.setattr("sys.argv", ["page", str(view.paths.root), option, str(tmp_path / name)])
        page_command.main()
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert len(json.loads((tmp_path / "trace.json").read_text())) > 60
    monkeypatch.setattr("sys.argv", ["page", str(tmp_path), str(view.paths.root), "--report", "x"])
    with pytest.raises(SystemExit, match="2"):
        page_command.main()
    assert "--report takes one run, and 2 are given" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["page", str(tmp_path / "none"), "--report", str(tmp_path / "none.html")])
    with pytest.raises(SystemExit, match="2"):
        page_command.main()
    assert "none does not exist" in capsys.readouterr().err and not (tmp_path / "none.html").exists()


def test_bundle_has_no_imports_and_no_name_twice():
    program = bundle_modules()
    assert not re.search(r"^(import|export) ", program, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|let|class|function)\*? (\w+)", program, re.MULTILINE)
    assert len(names) > 100 and sorted(set(names)) == sorted(names)
