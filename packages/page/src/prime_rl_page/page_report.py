"""One HTML file with the page and the data of a run, which opens from disk without a server."""

import base64
import gzip
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any
from urllib.parse import quote

import numpy as np

from prime_rl_page.run_data.run_view import RunView
from prime_rl_page.run_data.sample_index import conversation_text, preview

BUDGET_BYTES = 5_000_000
"""Largest size of a report; as many rollouts as fit are included."""
_MAX_POINTS = 300
_MAX_STEPS = 40
"""Steps from which rollouts are chosen."""
_PLACEHOLDER = "<data of the report>"
_TIMELINE_PIXELS = 1600
_MODULES = (
    "dom", "state", "source", "series_store", "chart", "canvas", "overview", "tokens", "rollouts", "timeline",
    "figure_plane", "figure_surface", "plots", "health", "settings", "compare", "main",
)  # fmt: skip
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def make_report(run: RunView, budget_bytes: int = BUDGET_BYTES) -> str:
    """The report of a run as HTML, of at most `budget_bytes` bytes unless curves and timeline alone need more."""
    folder = resources.files("prime_rl_page") / "static"
    library = (folder / "vendor/uPlot.iife.min.js").read_text()
    style = (folder / "vendor/uPlot.min.css").read_text() + (folder / "style.css").read_text()
    program = bundle_modules()
    icon = base64.b64encode((folder / "icon.svg").read_bytes()).decode()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, library, program)}">'
    scripts = f"<script>{library}</script>\n<script>{program}</script>"
    container = f'<script type="application/octet-stream" id="report-data">{_PLACEHOLDER}</script>'
    page = _replace(
        (folder / "index.html").read_text(),
        {
            '<meta charset="utf-8">\n': f'<meta charset="utf-8">\n{policy}\n',
            "<title>prime-rl</title>": f"<title>{html.escape(f'{run.label} · prime-rl')}</title>",
            '"/static/icon.svg"': f'"data:image/svg+xml;base64,{icon}"',
            '<link rel="stylesheet" href="/static/vendor/uPlot.min.css">\n': "",
            '<link rel="stylesheet" href="/static/style.css">': f"<style>{style}</style>",
            '<script src="/static/vendor/uPlot.iife.min.js" defer></script>\n': "",
            '<script type="module" src="/static/main.js"></script>\n': "",
            "</body>": f"{container}\n{scripts}\n</body>",
        },
    )
    left = budget_bytes - len(page.encode())
    data = base64.b64encode(gzip.compress(json.dumps({"answers": report_answers(run, left * 3 // 4)}).encode(), 9))
    return page.replace(_PLACEHOLDER, data.decode(), 1)


def _replace(text: str, parts: Mapping[str, str]) -> str:
    """Replace each key of `parts` by its value. Raises AssertionError unless it occurs exactly once."""
    for old, new in parts.items():
        assert text.count(old) == 1, f"index.html contains {old} {text.count(old)} times"
        text = text.replace(old, new)
    return text


def bundle_modules() -> str:
    """The modules of the page as one script: in the order of their imports, without `import` and `export`."""
    folder = resources.files("prime_rl_page") / "static"
    parts = [_EXPORT.sub("", _IMPORT.sub("", (folder / f"{name}.js").read_text())) for name in _MODULES]
    program = "(() => {\n" + "\n".join(parts) + "\n})();\n"
    assert "</script" not in program
    return program


def report_answers(run: RunView, budget_bytes: int) -> dict[str, Any]:
    """What the server would answer to the requests of the page, by path; compressed, about `budget_bytes`."""
    base = f"runs/{quote(run.name, safe='!()*~' + chr(39))}"
    health = run.read_health()  # the headline contains it
    overview = run.overview()
    names = [metric["name"] for metric in overview["metrics"]] + ["wait_share:trainer", "wait_share:orchestrator"]
    answers: dict[str, Any] = {
        "runs": {"runs": [run.describe()]},
        f"{base}/overview": overview,
        f"{base}/config": run.settings(),
        f"{base}/settings": {"text": run.settings_text()},
        f"{base}/series": run.series([*names, "efficiency:run"], _MAX_POINTS),
        f"{base}/timeline": run.timeline(None, None, _TIMELINE_PIXELS),
        f"{base}/health": health,
        f"{base}/figures": {"figures": run.figures()},
    }
    left = budget_bytes - _compressed_bytes(answers)
    rows = []
    for step, group, rollout in _choose_rollouts(run):
        if (detail := run.rollout(step, group, rollout)) is None:
            continue
        left -= _compressed_bytes(detail)
        if left < 0:
            break
        answers[f"{base}/rollouts/{step}/{group}/{rollout}"] = detail
        rows.append(_row(detail))
    envs, newest = sorted({row["env"] for row in rows}), max((row["step"] for row in rows), default=None)
    files = {"num_files": len(rows), "num_indexed": len(rows), "num_damaged": 0, "envs": envs, "newest_step": newest}
    answers[f"{base}/rollouts"] = {"rows": rows, "num_matching": len(rows), "next_position": None, **files}
    return answers


def _row(detail: dict[str, Any]) -> dict[str, Any]:
    keys = ("step", "group", "rollout", "env", "example", "reward", "advantage", "is_truncated", "staleness")
    row = {key: detail[key] for key in (*keys, "min_version", "max_version")}
    return {**row, "preview": preview(detail), "search": conversation_text(detail)[:20_000].lower()}


def _choose_rollouts(run: RunView) -> Iterator[tuple[int, int, int]]:
    """The best, the worst and the median rollout of each environment, of steps at equal distances; newest first."""
    entries = run.read_samples()
    if not len(entries):
        return
    steps = np.unique(entries["step"])
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(_MAX_STEPS, len(steps))).astype(int))]
    for step in _spread(chosen.tolist()):
        of_step = entries[entries["step"] == step]
        for env in np.unique(of_step["env"]).tolist():
            found = of_step[of_step["env"] == env]
            found = found[np.argsort(found["reward"], kind="stable")]
            for index in sorted({0, len(found) // 2, len(found) - 1}):
                yield step, int(found[index]["group_id"]), int(found[index]["rollout"])


def _spread(steps: list[int]) -> list[int]:
    """The newest and the first step, then the others with ever smaller gaps, so that a budget ends anywhere."""
    order, stride = [steps[-1], steps[0]], len(steps)
    while stride > 1:
        stride = (stride + 1) // 2
        order += steps[::-stride]
    return list(dict.fromkeys([*order, *steps]))


def _compressed_bytes(value: Any) -> int:
    return len(zlib.compress(json.dumps(value).encode(), 6))


def _policy(style: str, *scripts: str) -> str:
    """Allows the style and the scripts of the report by their hashes, and nothing else."""
    hashes = " ".join(_hash(script) for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; base-uri 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
