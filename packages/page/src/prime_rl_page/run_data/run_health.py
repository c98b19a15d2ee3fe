"""What the page shows about the state of a run: the diagnosis of `doctor`, and the version of each server."""

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.doctor.collect import contains_run
from prime_rl.supervisor.doctor.diagnosis import examine
from prime_rl.supervisor.doctor.rendering import as_json
from prime_rl_page.run_data.timeline_spans import Timeline

_MAX_AGE_SECONDS = 4.0
"""A running run is examined again after this time."""


class RunHealth:
    """The latest diagnosis of a run. Examining takes seconds while processes are alive, so the result is kept."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._latest: dict[str, Any] | None = None
        self._at = -math.inf

    def latest(self) -> dict[str, Any] | None:
        """The last diagnosis; None before the first `read`."""
        return self._latest

    def read(self) -> dict[str, Any]:
        """Diagnose the run, at most every few seconds. Blocks."""
        with self._lock:
            if self._latest is None or time.monotonic() - self._at > _MAX_AGE_SECONDS:
                self._latest = self._examine()
                self._at = time.monotonic()
            return self._latest

    def start(self) -> threading.Thread:
        """Call `read` in a thread that does not delay the end of this process, unless one does so already."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.read, name="health", daemon=True)
            self._thread.start()
        return self._thread

    def _examine(self) -> dict[str, Any]:
        if not contains_run(self._paths):
            problem = {"text": f"{self._paths.root} contains no run", "culprit": None, "hint": None}
            return {"state": "not running", "healthy": False, "problems": [problem], "notes": [], "processes": []}
        try:
            return as_json(examine(self._paths))
        except OSError as error:
            problem = {"text": f"{self._paths.root} cannot be read: {error.strerror}", "culprit": None, "hint": None}
            return {"state": "unknown", "healthy": False, "problems": [problem], "notes": [], "processes": []}


def first_problem(diagnosis: Mapping[str, Any]) -> dict[str, Any] | None:
    """The text and the hint of the first problem, and the number of further ones; None if there is none."""
    if not (problems := diagnosis.get("problems")):
        return None
    return {"text": problems[0]["text"], "hint": problems[0]["hint"], "num_others": len(problems) - 1}


def server_versions(timeline: Timeline, latest_metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """The policy version of each inference server, from its timeline; else from the metrics."""
    servers = []
    for name, lane in sorted(timeline.lanes.items()):
        if not name.startswith("inference") or name.endswith("_updates"):
            continue
        if (served := lane.served_version()) is not None:
            servers.append({"name": name, "version": served[0], "since": served[1]})
    if not servers and (version := latest_metrics.get("policy/version")) is not None:
        servers.append({"name": "oldest of all servers", "version": int(version), "since": None})
    return servers
