"""The CPU recipe in a real browser while it trains, after its page is killed, and after its end."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.browser import CHROMIUM, WatchedTab, chart_steps, colours_of
from tests.support.command import Command
from tests.support.server import free_port
from wandb.proto.wandb_internal_pb2 import Record

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install --no-install-recommends chromium"),
]
STEPS = 10
SETTINGS = """
[trainer]
grad_norm_interval = 2
[trainer.token_export]
interval = 1
[orchestrator.eval]
num_examples = 8
rollouts_per_example = 2
interval = 5
[[orchestrator.eval.env]]
id = "reverse_text"
args = { words = 200 }
[wandb]
offline = true
[wandb.log_extras]
interval = 2
figures = true
figure_interval = 4
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, browser):
    """The recipe with its page; it is running when the first test begins. The browser's processes are not its own."""
    pytest.importorskip("plotly")
    root = tmp_path_factory.mktemp("live")
    (root / "settings.toml").write_text(SETTINGS)
    files = ["@", "configs/reverse_text/cpu.toml", "@", str(root / "settings.toml"), "--output-dir", str(root / "run")]
    ports = ["--page.port", str(free_port()), "--inference.server.port", str(free_port())]
    command = Command("rl", [*files, *ports, "--max-steps", str(STEPS)], root / "run")
    yield command
    command.clean_up()


@pytest.fixture(scope="module")
def address(run):
    log = run.paths.log("page")
    run.until(lambda: log.exists() and re.match(r"page: http.*\n", log.read_text()), "the page")
    return log.read_text().split()[1]


@pytest.fixture(scope="module")
def finished(run):
    """The run after its regular end, although its page was killed before."""
    run.role("page").kill()
    assert run.end() == 0, run.story()
    return run.paths


def test_running_recipe_is_drawn_step_by_step_without_a_reload(run, address, browser):
    tab = WatchedTab(browser)
    page = tab.page
    page.goto(address)
    page.evaluate("window.marked = true")
    seen = set()
    for step in (0, 2, 4):
        run.until(lambda: chart_steps(page, "Reward")[-1:] >= [step], f"the curve of step {step}")  # noqa: B023
        seen.add(len(chart_steps(page, "Reward")))
        page.wait_for_timeout(50)
    assert len(seen) == 3 and run.process.poll() is None, "the curve grew while the run trained"
    run.until(lambda: len(chart_steps(page, "Gradient norm")) >= 3, "the curve of the trainer")
    page.get_by_role("link", name="Timeline").click()
    for lane in ("trainer_0", "orchestrator", "inference"):
        page.get_by_label(f"phases of {lane}", exact=True).wait_for()
    page.get_by_role("link", name="Plots").click()
    page.locator("canvas[data-figure=reward_landscape]").wait_for()
    assert colours_of(page, "reward_landscape") > 10
    assert page.evaluate("window.marked") is True
    tab.check(("http", urlsplit(address).netloc))


def test_run_whose_page_is_killed_ends_regularly_and_says_so(run, address, finished):
    assert "warning: the page was killed by SIGKILL; the run continues" in run.output
    assert len(finished.metrics("trainer").read_text().splitlines()) == STEPS


def documented_names():
    """The names of the table of configs/aqua_rat that every run logs, as patterns."""
    table = Path("configs/aqua_rat/README.md").read_text().split("### Metrics")[1].split("### ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    # Of a loss with several parts, an optimizer with several rates, and several ranks.
    optional = {"loss/<part>", "lr/<role>", "rank/slowest"}
    names = {name for cell in cells for name in re.findall("`([^`]+)`", cell)}
    assert len(names) > 40 and optional <= names
    names -= optional
    # This run evaluates by `eval` instead of `val`.
    return [re.sub(r"<\w+>", r"[^/]+", name).replace("val/", "eval/", name.startswith("val/")) for name in names]


_HEADER, _BLOCK, _RECORD_HEADER = 7, 32768, 7
_FULL, _LAST = 1, 4


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Read the file of an offline W&B run, which has the format of LevelDB's logs.

    Yields what each call of `run.log` logged; nested values have names such as `samples/_type`."""
    for record in _records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(file: Path) -> Iterator[Any]:
    data, at, part = file.read_bytes(), _HEADER, b""
    while at + _RECORD_HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD_HEADER:  # padding
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + _RECORD_HEADER : at + _RECORD_HEADER + size]
        at += _RECORD_HEADER + size
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(part)
            yield record
            part = b""


def test_offline_wandb_files_hold_documented_scalars_samples_distributions_and_figures(finished):
    files = list(finished.root.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2, "trainer and orchestrator"
    rows = [row for file in files for row in history(file)]
    names = {name for row in rows for name in row}
    for pattern in documented_names():
        assert any(re.fullmatch(pattern, name) for name in names), pattern
    assert {"samples/path", "distributions/path", "distributions/reward/bins", "distributions/entropy/bins"} <= names
    for figure in ("reward_landscape", "advantage_distribution", "pass_at_k", "gradient_flow"):
        paths = [row[f"viz/{figure}/path"] for row in rows if f"viz/{figure}/path" in row]
        content = [
            json.loads(file.read_text()) for path in paths for file in finished.root.glob(f"wandb/*/files/{path}")
        ]
        assert content and all(one["data"] for one in content), figure
    samples = next(row["samples/path"] for row in rows if "samples/path" in row)
    [table] = [json.loads(file.read_text()) for file in finished.root.glob(f"wandb/*/files/{samples}")]
    assert {"step", "reward", "messages"} <= set(table["columns"]) and len(table["data"]) == 1024
