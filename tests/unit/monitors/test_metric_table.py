"""Declared metrics: lookup, deprecated names, undeclared names, and the generated page."""

import json
import re
from pathlib import Path

import pytest

from prime_rl.monitors import Monitor
from prime_rl.monitors.metric_table import (
    EVALUATION,
    ORCHESTRATOR,
    STRICT_VARIABLE,
    TRAINER,
    Metric,
    MetricTable,
    UndeclaredMetricError,
)
from prime_rl.storage.paths import RunPaths

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("table", "name", "declared"),
    [
        (TRAINER, "loss", "loss"),
        (TRAINER, "lr/matrix", "lr/<role>"),
        (ORCHESTRATOR, "reward/sampled/mean", "reward/sampled/mean"),
        (ORCHESTRATOR, "reward/primeintellect/gsm8k/mean", "reward/<env>/mean"),
        (ORCHESTRATOR, "dropped/error/toy", "dropped/error/<env>"),
        (ORCHESTRATOR, "dropped/filter/difficulty", "dropped/<reason>"),
        (ORCHESTRATOR, "val/toy/pass@2", "val/<env>/pass@<k>"),
        (EVALUATION, "eval/toy/metrics/accuracy", "eval/<env>/metrics/<name>"),
        *((TRAINER, name, None) for name in ("losses", "loss/", "lr/", "reward", "Loss")),
    ],
)
def test_metric_table_find_returns_the_declared_metric_or_none(table, name, declared):
    found = table.find(name)
    assert (found and found.name) == declared


def test_monitor_log_renamed_metric_writes_the_deprecated_name_too(tmp_path):
    monitor = Monitor(RunPaths(tmp_path), "orchestrator", None)
    monitor.log(0, {"dropped/error/toy": 2, "weights/versions_skipped": 1})
    [line] = map(json.loads, RunPaths(tmp_path).metrics("orchestrator").read_text().splitlines())
    assert (line["dropped/error/toy"], line["error/toy"]) == (2, 2)
    assert (line["weights/versions_skipped"], line["policy/skipped"]) == (1, 1)


def test_metric_table_deprecated_name_is_read_and_keeps_its_placeholder():
    assert ORCHESTRATOR.read({"batch/filled_degenerate": 3}, "batch/zero_advantage_filler") == 3
    assert ORCHESTRATOR.read({}, "batch/zero_advantage_filler", 0) == 0
    table = MetricTable("test", [Metric("new/<env>/mean", "", "x", "old/<env>")])
    assert table.old_name("new/a/b/mean") == "old/a/b"


def test_monitor_log_undeclared_metric_raises_in_tests(tmp_path):
    monitor = Monitor(RunPaths(tmp_path), "trainer", None)
    for _ in range(2):
        with pytest.raises(UndeclaredMetricError, match="metric 'losss' of trainer is not declared"):
            monitor.log(0, {"losss": 1.0})


def test_monitor_log_undeclared_metric_in_production_warns_once_and_keeps_it(tmp_path, monkeypatch, said):
    monkeypatch.setenv(STRICT_VARIABLE, "0")
    monitor = Monitor(RunPaths(tmp_path), "trainer", None)
    for step in range(2):
        monitor.log(step, {"my/own": 1.0})
    assert sum("'my/own'" in line for line in said()) == 1
    lines = map(json.loads, RunPaths(tmp_path).metrics("trainer").read_text().splitlines())
    assert [line["my/own"] for line in lines] == [1.0, 1.0]


@pytest.mark.parametrize("table", [TRAINER, ORCHESTRATOR, EVALUATION])
def test_metric_table_names_are_unique_and_have_a_meaning(table):
    names = [metric.name for metric in table.metrics]
    assert len(names) == len(set(names))
    assert all(metric.meaning for metric in table.metrics)


def test_documented_names_of_other_guides_are_declared():
    page = (REPOSITORY / "configs/aqua_rat/README.md").read_text()
    table = page.partition("### Metrics")[2].partition("\n### ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    declared = {metric.name for table in (TRAINER, ORCHESTRATOR) for metric in table.metrics}
    assert len(names) > 30
    assert set(names) <= declared
