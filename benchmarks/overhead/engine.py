"""An inference server without a model: canned responses over raw asyncio.

It has token streams, with the real server's code, the routes that the orchestrator uses, and OpenAI's chat completions,
with all fields of vLLM 0.32. It also simulates the trainer of a run: it publishes version n + 1 as soon as batch n
exists.

    python benchmarks/overhead/engine.py TOKENIZER PROMPT_TOKENS COMPLETION_TOKENS    prints its port

`--latency S` delays each streamed sample by a random time, S seconds on average. `--lag FILE` records the event loop's
lag (lag_log.py). `--servers N` serves on N ports, each printed on a line, with its own version.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from lag_log import record_lag
from raw_http import Write, http, serve
from transformers import PreTrainedTokenizerFast

from prime_rl.inference.generation_stream import StreamedSample
from prime_rl.liveness.parent_process import die_with_parent
from prime_rl.rollouts.clients.generation_messages import Completion, SampleRequest
from prime_rl.storage.artifact import WEIGHTS_FORMAT, publish_artifact
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import watch_directory

ANSWERS = 16
_VERSION = b'"0.VERSION"'


class LeanEngine:
    """Returns one of a few completions for each request; also the `Generator` of its token streams."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: int, completion: int, latency_seconds: float = 0.0
    ) -> None:
        draws = np.random.default_rng(0)
        sampled = draws.integers(min(300, len(tokenizer) // 2), len(tokenizer) - 10, (ANSWERS, completion)).tolist()
        logprobs = (-draws.exponential(0.7, (ANSWERS, completion))).tolist()
        pairs = list(zip(sampled, logprobs, strict=True))
        self._streamed = [(np.array(ids, "<i4").tobytes(), np.array(each, "<f4").tobytes()) for ids, each in pairs]
        self._length, self._latency_seconds, self._delays = completion, latency_seconds, random.Random(0)
        self._generated = [json.dumps(generated(*pair)).encode() for pair in pairs]
        self._chats = [http(json.dumps(chat(tokenizer, prompt, *pair)).encode()) for pair in pairs]
        self._next = 0
        self._step = 0
        self._trainers: set[asyncio.Task[None]] = set()
        self._switch(0)

    async def start(self, request: SampleRequest, samples: Sequence[StreamedSample]) -> None:
        """Answer each sample after its latency."""
        if not self._latency_seconds:
            for sample in samples:
                self._finish(sample)
            return
        loop = asyncio.get_running_loop()
        for sample in samples:
            loop.call_later(self._latency_seconds * self._delays.uniform(0.5, 1.5), self._finish, sample)

    def _finish(self, sample: StreamedSample) -> None:
        self._next = (self._next + 1) % ANSWERS
        token_ids, logprobs = self._streamed[self._next]
        sample.put(Completion(sample.id, token_ids, logprobs, [(f"0.{self._step}", 0, self._length)], "stop"))

    async def abort(self, names: Sequence[str]) -> None:
        """Do nothing: the result of a cancelled sample is dropped."""

    def add_load(self, samples: int) -> None:
        """Do nothing."""

    def status_of(self, error: Exception) -> tuple[int, str]:
        """Every exception is a fault of this program."""
        return 500, repr(error)

    def answer(self, path: bytes, body: bytes, write: Write) -> None:
        """Write the whole HTTP response."""
        write(self._response(path, body))

    def _response(self, path: bytes, body: bytes) -> bytes:
        self._next = (self._next + 1) % ANSWERS
        if path == b"/inference/v1/generate":
            return self._versioned[self._next]
        if path == b"/v1/chat/completions":
            return self._chats[self._next]
        if path == b"/update_weights":
            self._switch(json.loads(body)["step"])
        elif path == b"/reload_weights":
            self._switch(0)
        elif path == b"/train":  # starts the simulated trainer of a run; no real server has this route
            given = json.loads(body)
            task = asyncio.ensure_future(train(RunPaths(Path(given["run"])), given["steps"]))
            self._trainers.add(task)
        elif path == b"/metrics":
            return http(b"")
        loaded = {"run_id": "overhead", "branch": 0, "step": self._step, "hash": f"h{self._step}", "model": "m"}
        return http(json.dumps(loaded | {"pause_s": 0.0, "load_s": 0.0}).encode())

    def _switch(self, step: int) -> None:
        self._step = step
        version = f'"0.{step}"'.encode()
        self._versioned = [http(answer.replace(_VERSION, version)) for answer in self._generated]


def generated(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    entries = [{"token_id": i, "logprob": p, "rank": 1} for i, p in zip(ids, logprobs, strict=True)]
    choice = {
        "index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids, "routed_experts": None,
        "sampling_mask": None, "weight_versions": [{"version": "0.VERSION", "start": 0, "end": len(ids)}],
        "logprobs": {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]},
    }  # fmt: skip
    return {"request_id": "0" * 32, "usage": None, "output_mode": "tokens", "choices": [choice]}


def chat(tokenizer: PreTrainedTokenizerFast, prompt: int, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    tokens = [tokenizer.decode([i]) for i in ids]
    content = [
        {"token": token, "logprob": p, "bytes": list(token.encode()), "top_logprobs": []}
        for token, p in zip(tokens, logprobs, strict=True)
    ]
    choice = {
        "index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids, "logprobs": {"content": content},
        "message": {"role": "assistant", "content": tokenizer.decode(ids)},
    }  # fmt: skip
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
    return {
        "id": "0" * 32, "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage,
        "prompt_token_ids": ids[:1] * prompt,
    }  # fmt: skip


async def train(paths: RunPaths, steps: int) -> None:
    """Publish version n + 1 after batch n, with a manifest only."""
    stop, done = asyncio.Event(), 0
    async for _ in watch_directory(paths.rollouts_dir, stop):
        while done < steps and paths.rollouts(done).exists():
            done += 1
            manifest = {"format": WEIGHTS_FORMAT, "branch": 0, "step": done, "tensors": {}, "hash": f"h{done}"}
            publish_artifact(paths.weights(done), lambda _, manifest=manifest: manifest)
        if done == steps:
            stop.set()


async def run(engines: Sequence[LeanEngine], lag: Path | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            server = await serve(engine.answer, engine)
            tasks.create_task(server.serve_forever())
        if lag is not None:
            tasks.create_task(record_lag(lag))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("prompt", type=int)
    parser.add_argument("completion", type=int)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--lag", type=Path)
    parser.add_argument("--servers", type=int, default=1)
    args = parser.parse_args()
    die_with_parent()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    settings = tokenizer, args.prompt, args.completion, args.latency
    uvloop.run(run([LeanEngine(*settings) for _ in range(args.servers)], args.lag))


if __name__ == "__main__":
    main()
