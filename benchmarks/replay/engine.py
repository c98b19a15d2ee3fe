"""An inference server with the latency of a trace and no model, and a simulated trainer, in one process.

    python -m replay.engine RUN_DIRECTORY       prints its port; writes engine.json after the last step

The server has slots. A request waits for a slot (first come, first served) and occupies it for the time of its rollout
in the trace, which the request's seed identifies. The trainer takes `t_train` from the time of batch n or the end of
its previous step, and publishes version n + 1. Both use due times instead of the time of processing: a busy machine
delays responses, but makes neither engine nor trainer slower.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from overhead.raw_http import Write, http, serve
from pipeline_model import Trace

from prime_rl.liveness.parent_process import die_with_parent
from prime_rl.storage.artifact import WEIGHTS_FORMAT, publish_artifact
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import watch_directory
from replay.spec import RECORD, Spec, replayed_tokens

_TOKEN = 300
_ENVIRONMENT, _TURN = 0, 0
_KV_USAGE = 0.5


@dataclass(frozen=True)
class Rollout:
    """The rollout of the trace for a request."""

    group_id: int
    seconds: float
    tokens: int


class Rollouts:
    """Finds a rollout of the trace by the seed of its request, which the orchestrator derives from its position."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._draws = trace.draws()
        self._by_seed: dict[int, Rollout] = {}

    def take(self, seed: int) -> Rollout:
        """Return the rollout; raise KeyError if it is unknown or was taken before."""
        while seed not in self._by_seed:
            self._read_on(seed)
        return self._by_seed.pop(seed)

    def _read_on(self, wanted: int) -> None:
        draw = next(self._draws)
        work = self._trace.workload
        if draw.group_id > 4 * work.steps * work.batch_groups:
            raise KeyError(f"no rollout of the trace has the seed {wanted}")
        lengths, seconds = self._trace.lengths(draw).tolist(), self._trace.seconds(draw).tolist()
        for index, (length, duration) in enumerate(zip(lengths, seconds, strict=True)):
            state = np.random.SeedSequence([self._trace.seed, _ENVIRONMENT, draw.group_id, index, _TURN])
            self._by_seed[int(state.generate_state(1)[0])] = Rollout(draw.group_id, duration, replayed_tokens(length))


class ReplayEngine:
    """Slots, a queue of requests, and the routes that an orchestrator uses."""

    def __init__(self, trace: Trace) -> None:
        self._rollouts = Rollouts(trace)
        self._slots = self._free = trace.workload.slots
        self._queue: deque[tuple[Rollout, float, Write]] = deque()
        self.switches: list[tuple[float, int]] = [(0.0, 0)]
        self._loaded = {"run_id": None, "branch": 0, "step": 0, "hash": "base", "model": "trace"}
        self.answers: dict[int, float] = {}
        """When the last rollout of each group was over."""

    def answer(self, path: bytes, body: bytes, write: Write) -> None:
        """Respond to a request, immediately or at the end of its rollout."""
        if path == b"/inference/v1/generate":
            self._generate(body, write)
            return
        if path == b"/update_weights":
            given = json.loads(body)
            manifest = json.loads((Path(given["weight_dir"]) / "manifest.json").read_text())
            self._switch(given["step"], manifest["hash"])
        elif path == b"/reload_weights":
            self._loaded["run_id"] = json.loads(body)["run_id"]
            self._switch(0, "base")
        elif path == b"/release_policy":
            self._loaded["run_id"] = None
        write(http(self._metrics() if path == b"/metrics" else json.dumps(self._loaded).encode()))

    def _switch(self, step: int, content: str) -> None:
        self._loaded |= {"step": step, "hash": content}
        self.switches.append((time.monotonic(), step))

    def _generate(self, body: bytes, write: Write) -> None:
        try:
            rollout = self._rollouts.take(msgspec.json.decode(body)["sampling_params"]["seed"])
        except KeyError as error:
            write(http(json.dumps({"error": str(error)}).encode(), "500 Internal Server Error"))
            return
        arrival = time.monotonic()
        if self._free:
            self._free -= 1
            self._start(rollout, arrival, write)
        else:
            self._queue.append((rollout, arrival, write))

    def _start(self, rollout: Rollout, at: float, write: Write) -> None:
        due = at + rollout.seconds
        loop = asyncio.get_running_loop()
        loop.call_later(due - time.monotonic(), self._end, rollout, at, due, write)

    def _end(self, rollout: Rollout, began: float, due: float, write: Write) -> None:
        self.answers[rollout.group_id] = due
        write(http(completion(rollout.tokens, list(self._spans(rollout.tokens, began, due)))))
        if self._queue:
            following, arrival, write_following = self._queue.popleft()
            self._start(following, max(due, arrival), write_following)
        else:
            self._free += 1

    def _spans(self, tokens: int, began: float, ended: float) -> Iterator[dict[str, Any]]:
        """Return the versions that sampled the tokens, spread evenly over the time."""
        index = len(self.switches) - 1
        while index and self.switches[index][0] > began:
            index -= 1
        start = 0
        for (_, step), (until, _) in zip(
            self.switches[index:], chain(self.switches[index + 1 :], [(ended, 0)]), strict=True
        ):
            end = tokens if until >= ended else int(tokens * (until - began) / (ended - began))
            if end > start:
                yield {"version": f"0.{step}", "start": start, "end": end}
                start = end

    def _metrics(self) -> bytes:
        running = self._slots - self._free
        values = {
            "num_requests_running": running,
            "num_requests_waiting": len(self._queue),
            "kv_cache_usage_perc": _KV_USAGE * running / self._slots,
            "num_preemptions_total": 0,
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items()).encode()


def completion(tokens: int, spans: list[dict[str, Any]]) -> bytes:
    """Return the response fields that the orchestrator reads."""
    choice = {
        "index": 0, "finish_reason": "stop", "token_ids": [_TOKEN] * tokens, "weight_versions": spans,
        "logprobs": {"content": [{"token_id": _TOKEN, "logprob": -0.5}] * tokens},
    }  # fmt: skip
    return msgspec.json.encode({"request_id": "0", "choices": [choice]})


class Trainer:
    """Trains each batch for a fixed time."""

    def __init__(self, paths: RunPaths, steps: int, t_train: float) -> None:
        self._paths, self._steps, self._t_train = paths, steps, t_train
        self.arrivals: list[float] = []
        self._arrived = asyncio.Event()
        self.step_ends: list[float] = []

    async def run(self) -> None:
        """Train on all batches."""
        stop = asyncio.Event()
        watching = asyncio.create_task(self._watch(stop))
        for step in range(self._steps):
            while len(self.arrivals) <= step:
                self._arrived.clear()
                await self._arrived.wait()
            end = max(self.arrivals[step], self.step_ends[-1] if step else 0.0) + self._t_train
            await asyncio.sleep(end - time.monotonic())
            self.step_ends.append(end)
            await asyncio.to_thread(self._publish, step + 1)
        stop.set()
        await watching

    async def _watch(self, stop: asyncio.Event) -> None:
        async for _ in watch_directory(self._paths.rollouts_dir, stop):
            while self._paths.rollouts(len(self.arrivals)).exists():
                self.arrivals.append(time.monotonic())
                self._arrived.set()

    def _publish(self, version: int) -> None:
        manifest = {"format": WEIGHTS_FORMAT, "branch": 0, "step": version, "tensors": {}, "hash": f"h{version}"}
        publish_artifact(self._paths.weights(version), lambda _: manifest)


async def run(spec: Spec) -> None:
    paths = RunPaths(spec.root)
    engine = ReplayEngine(spec.trace)
    trainer = Trainer(paths, spec.workload.steps, spec.workload.t_train)
    server = await serve(engine.answer)
    await trainer.run()
    record = {
        "step_ends": trainer.step_ends, "arrivals": trainer.arrivals, "switches": engine.switches,
        "answers": list(engine.answers.items()), "cpu_s": time.process_time(),
    }  # fmt: skip
    (spec.root / RECORD).write_text(json.dumps(record))
    await server.serve_forever()  # the orchestrator still switches to the last version


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(run(Spec.read(Path(sys.argv[1]))))
