"""Phases of a process, read from its timeline."""

import json

from prime_rl.page.json_lines import JsonLinesFile
from prime_rl.page.timeline_spans import Lane


def test_served_version_is_the_newest_that_was_swapped_in(tmp_path):
    file = tmp_path / "inference.jsonl"
    lane = Lane("inference", JsonLinesFile(file))
    assert lane.served_version() is None
    phases = [("swap", 2.0, 4), ("serve", 2.5, None), ("stage", 3.0, 5)]
    file.write_text("".join(
        json.dumps({"name": name, "start": end - 1, "end": end, "waiting_for": None, "step": None, "version": version})
        + "\n"
        for name, end, version in phases
    ))  # fmt: skip
    lane.refresh()
    assert len(lane) == 3 and lane.served_version() == (4, 2.0)
