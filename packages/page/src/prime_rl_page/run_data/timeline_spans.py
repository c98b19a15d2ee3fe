"""The timeline of a run: finished phases of each process from timeline/<process>.jsonl, and events."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_rl.core.json_lines import JsonLinesFile
from prime_rl.liveness.heartbeat_monitor import ENDED, FAILED, HeartbeatRecord, read_heartbeats
from prime_rl.storage.paths import RunPaths
from prime_rl_page.run_data.metric_series import is_number

_MAX_EVENTS = 500
_EVENT_KEYS = ("time", "event", "name", "role", "code", "detail")
_ROLE_ORDER = ("rl", "orchestrator", "inference", "engine", "trainer", "env")


class Lane:
    """The finished phases of one process, in order of their ends."""

    def __init__(self, name: str, file: JsonLinesFile) -> None:
        self.name, self.file = name, file
        self._texts: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self.starts, self.ends, self.busy = array("d"), array("d"), array("d")
        self.names, self.waiting = array("l"), array("l")
        self.steps, self.versions = array("d"), array("d")

    def __len__(self) -> int:
        return len(self.starts)

    def refresh(self) -> None:
        """Read the new lines; lines without valid times are skipped."""
        for row in self.file.follow(self._clear):
            start, end = _number(row.get("start")), _number(row.get("end"))
            if not (math.isfinite(start) and math.isfinite(end) and start <= end):
                self.file.num_damaged += 1
                continue
            self.starts.append(start)
            self.ends.append(end)
            self.names.append(self._number_of(row.get("name")))
            self.waiting.append(self._number_of(row.get("waiting_for")))
            self.busy.append(_number(row.get("busy")))
            self.steps.append(_number(row.get("step")))
            self.versions.append(_number(row.get("version")))

    def _number_of(self, text: object) -> int:
        return -1 if text is None else self._texts.setdefault(str(text)[:200], len(self._texts))

    @property
    def texts(self) -> list[str]:
        """Names of phases and roles; spans refer to them by index."""
        return list(self._texts)

    def served_version(self) -> tuple[int, float] | None:
        """The version of the newest phase that names one, and its end."""
        for index in reversed(range(len(self))):
            if math.isfinite(self.versions[index]):
                return int(self.versions[index]), self.ends[index]
        return None

    def window(self, begin: float, end: float, min_seconds: float) -> list[dict[str, Any]]:
        """The phases between two times. Neighbours shorter than `min_seconds` are merged into one entry."""
        starts, ends = _array(self.starts), _array(self.ends)
        waiting, busy = np.array(self.waiting, dtype=np.int64), _array(self.busy)
        inside = np.flatnonzero((ends >= begin) & (starts <= end))
        inside = inside[np.argsort(starts[inside], kind="stable")]
        spans: list[dict[str, Any]] = []
        open_: list[int] = []
        for index in inside.tolist():
            short = ends[index] - starts[index] < min_seconds
            if open_ and (not short or ends[index] - starts[open_[0]] > min_seconds):
                spans.append(self._merged(open_, starts, ends, waiting, busy))
                open_ = []
            if short:
                open_.append(index)
            else:
                spans.append(self._one(index))
        if open_:
            spans.append(self._merged(open_, starts, ends, waiting, busy))
        return spans

    def _one(self, index: int) -> dict[str, Any]:
        texts, name, waiting = self.texts, self.names[index], self.waiting[index]
        span: dict[str, Any] = {
            "start": round(self.starts[index], 4),
            "end": round(self.ends[index], 4),
            "name": texts[name] if name >= 0 else "",
            "waiting_for": texts[waiting] if waiting >= 0 else None,
        }
        for key, column in (("step", self.steps), ("version", self.versions), ("busy", self.busy)):
            if math.isfinite(column[index]):
                span[key] = round(column[index], 4)
        return span

    def _merged(
        self,
        indices: Sequence[int],
        starts: NDArray[Any],
        ends: NDArray[Any],
        waiting: NDArray[Any],
        busy: NDArray[Any],
    ) -> dict[str, Any]:
        if len(indices) == 1:
            return self._one(indices[0])
        chosen = np.array(indices)
        seconds = ends[chosen] - starts[chosen]
        working = np.where(waiting[chosen] >= 0, 0.0, np.nan_to_num(busy[chosen], nan=1.0))
        share = float((seconds * working).sum() / total) if (total := float(seconds.sum())) > 0 else 0.0
        return {
            "start": round(float(starts[chosen].min()), 4), "end": round(float(ends[chosen].max()), 4),
            "name": f"{len(indices)} short phases", "waiting_for": None, "busy": round(share, 3),
            "merged": len(indices),
        }  # fmt: skip

    def totals(self, begin: float, end: float) -> dict[str, Any]:
        """Seconds of the window in which the process worked, and waited for each role."""
        starts, ends = np.maximum(_array(self.starts), begin), np.minimum(_array(self.ends), end)
        seconds = np.clip(ends - starts, 0, None)
        waiting, texts = np.array(self.waiting, dtype=np.int64), self.texts
        busy = np.where(waiting >= 0, 0.0, np.nan_to_num(_array(self.busy), nan=1.0)) * seconds
        waits = {
            texts[n]: round(float(seconds[waiting == n].sum()), 3) for n in np.unique(waiting[waiting >= 0]).tolist()
        }
        covered = float(seconds.sum())
        return {
            "covered_seconds": round(covered, 3),
            "busy_seconds": round(float(busy.sum()), 3),
            "idle_share": round(1 - float(busy.sum()) / covered, 4) if covered > 0 else None,
            "waits": {role: value for role, value in waits.items() if value > 0},
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """All phases, in order of the file."""
        return (self._one(index) for index in range(len(self)))


class Timeline:
    """All lanes of a run, and its events."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.lanes: dict[str, Lane] = {}
        self._events_file = JsonLinesFile(paths.events)
        self.events: list[dict[str, Any]] = []
        """Starts, failures and restarts from events.jsonl, in order."""

    def refresh(self) -> None:
        """Read phases and events that were written since the last call."""
        folder = self._paths.timeline_dir
        names = sorted(path.stem for path in folder.glob("*.jsonl")) if folder.is_dir() else []
        for name in names:
            if name not in self.lanes:
                self.lanes[name] = Lane(name, JsonLinesFile(folder / f"{name}.jsonl"))
        for lane in self.lanes.values():
            lane.refresh()
        for row in self._events_file.follow(self.events.clear):
            if math.isfinite(_number(row.get("time"))):
                self.events.append(row)

    @property
    def num_spans(self) -> int:
        """Number of finished phases of all lanes."""
        return sum(map(len, self.lanes.values()))

    def _bounds(self, unfinished: Mapping[str, dict[str, Any]]) -> tuple[float, float] | None:
        """Time of the first and of the last phase or event; None if there are none."""
        times = [float(event["time"]) for event in self.events]
        times += [span[key] for span in unfinished.values() for key in ("start", "end")]
        for lane in self.lanes.values():
            if len(lane):
                times += [min(lane.starts), lane.ends[-1]]
        return (min(times), max(times)) if times else None

    def window(
        self, begin: float | None, end: float | None, num_pixels: int, counted: Sequence[float] | None = None
    ) -> dict[str, Any]:
        """Lanes and events between two times; None is the beginning or the end of the run.

        The totals are those between the times `counted`, or of the same window.
        """
        beats = read_heartbeats(self._paths)
        unfinished = {name: span for name, beat in beats.items() if (span := self._unfinished(beat)) is not None}
        current = _current(beats)
        if (bounds := self._bounds(unfinished)) is None:
            nothing: dict[str, Any] = {"begin": None, "end": None, "lanes": [], "events": []}
            return {**nothing, "current": current, "has_phases": False}
        begin, end = bounds[0] if begin is None else begin, bounds[1] if end is None else end
        min_seconds = max(0.0, end - begin) / max(100, min(num_pixels, 4000))
        lanes = []
        for name in sorted({*self.lanes, *unfinished}, key=_lane_order):
            lane = self.lanes.get(name) or Lane(name, JsonLinesFile(self._paths.timeline(name)))
            spans = lane.window(begin, end, min_seconds)
            if (span := unfinished.get(name)) is not None and span["end"] >= begin and span["start"] <= end:
                spans.append(span)
            lanes.append({"name": name, "spans": spans, **lane.totals(*(counted or (begin, end)))})
        events = [
            {key: event[key] for key in _EVENT_KEYS if event.get(key) is not None}
            for event in self.events
            if begin <= float(event["time"]) <= end
        ]
        return {
            "begin": begin, "end": end, "counted": counted or (begin, end), "first": bounds[0], "last": bounds[1],
            "lanes": lanes, "events": events[-_MAX_EVENTS:], "current": current,
            "has_phases": bool(self.num_spans or unfinished),
        }  # fmt: skip

    def _unfinished(self, beat: HeartbeatRecord) -> dict[str, Any] | None:
        """The phase in which a process is, or was when it was killed, up to its last heartbeat; None if it exited."""
        if beat.phase in (ENDED, FAILED):
            return None
        lane = self.lanes.get(beat.name)
        start = max(beat.phase_since, lane.ends[-1] if lane is not None and len(lane) else -math.inf)
        if beat.written <= start:
            return None
        name = {"name": beat.phase, "waiting_for": beat.waiting_for, "unfinished": True}
        return {"start": round(start, 4), "end": round(beat.written, 4), **name}


def _current(beats: Mapping[str, HeartbeatRecord]) -> dict[str, Any]:
    """The last known phase of each process."""
    return {
        name: {
            "phase": beat.phase,
            "since": beat.phase_since,
            "written": beat.written,
            "waiting_for": beat.waiting_for,
        }
        for name, beat in sorted(beats.items())
    }


def chrome_trace(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace format (JSON array format), for ui.perfetto.dev: a process per lane; microseconds."""
    lanes = sorted(timeline.lanes.values(), key=lambda lane: _lane_order(lane.name))
    numbers = {lane.name: number for number, lane in enumerate(lanes, start=1)}
    for name, number in numbers.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    for lane in lanes:
        for span in lane.rows():
            kept = ("step", "version", "waiting_for", "busy")
            yield {
                "ph": "X", "name": span["name"], "cat": "wait" if span["waiting_for"] else "work",
                "ts": round(span["start"] * 1e6), "dur": max(1, round((span["end"] - span["start"]) * 1e6)),
                "pid": numbers[lane.name], "tid": 0,
                "args": {key: span[key] for key in kept if span.get(key) is not None},
            }  # fmt: skip
    for event in timeline.events:
        name = str(event.get("name", ""))
        yield {
            "ph": "i", "name": f"{name} {event.get('event', '')}", "cat": "event", "s": "g",
            "ts": round(float(event["time"]) * 1e6), "pid": numbers.get(name, 0), "tid": 0,
            "args": {key: str(value) for key, value in event.items() if key != "time"},
        }  # fmt: skip


def _lane_order(name: str) -> tuple[int, str]:
    role = name.split("_")[0]
    return _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER), name


def _number(value: object) -> float:
    return float(value) if is_number(value) else math.nan


def _array(values: array) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)
