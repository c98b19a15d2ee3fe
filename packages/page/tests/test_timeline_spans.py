"""Phases of a process, read from its timeline."""

import json
import time

from prime_rl.core.json_lines import JsonLinesFile
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
from prime_rl_page.run_data.timeline_spans import Lane, Timeline


def test_served_version_is_the_newest_that_was_swapped_in(tmp_path):
    file = tmp_path / "inference.jsonl"
    lane = Lane("inference", JsonLinesFile(file))
    assert lane.served_version() is None
    phases = [("serve", 2.0, 3), ("pause", 2.5, 4), ("end", 3.0, None)]
    file.write_text("".join(
        json.dumps({"name": name, "start": end - 1, "end": end, "waiting_for": None, "step": None, "version": version})
        + "\n"
        for name, end, version in phases
    ))  # fmt: skip
    lane.refresh()
    assert len(lane) == 3 and lane.served_version() == (4, 2.5)


def test_phase_of_a_process_that_has_not_exited_is_shown_up_to_its_last_heartbeat(tmp_path):
    paths = RunPaths(tmp_path)
    killed = HeartbeatWriter(paths, "trainer_0", "trainer")
    killed.enter("train step 7")
    time.sleep(0.01)
    killed._write()
    window = Timeline(paths).window(None, None, 1000)
    [lane] = window["lanes"]
    [span] = lane["spans"]
    assert (lane["name"], span["name"], span["unfinished"]) == ("trainer_0", "train step 7", True)
    assert window["begin"] == span["start"] < span["end"] == window["end"]
    assert window["has_phases"]
    killed.close()
    assert Timeline(paths).window(None, None, 1000)["lanes"] == []
