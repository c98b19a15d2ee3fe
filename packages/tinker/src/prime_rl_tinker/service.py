"""Sessions, models and samplers of a Tinker server, and the results that clients fetch."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from prime_rl_tinker import requests
from prime_rl_tinker.checkpoint_store import CheckpointPath, CheckpointStore, check_name, read_fields
from prime_rl_tinker.messages import Answer, CreateModel, LoadWeights, Operation, OptimStep, RemoveModel, SaveWeights
from prime_rl_tinker.samplers import Samplers, to_response
from prime_rl_tinker.sequencer import Sequencer
from prime_rl_tinker.wire import NO_FORMULA, STABLE, RequestError, ScoringRequest

_RESULT_SECONDS = 1800.0
"""A result can be fetched, also again, for so long."""
Result: TypeAlias = dict[str, Any] | bytes
"""What `retrieve_future` answers: JSON, or protobuf."""
_LAYERS = ("train_unembed", "train_mlp", "train_attn")


class GoneError(Exception):
    """A session or a result does not exist any more."""


@dataclass(slots=True)
class Sampler:
    """A sampling session: a folder of weights, those that a model published last, or the base model."""

    base_model: str
    folder: Path | None = None
    path: str | None = None
    inflight_of: str | None = None  # model whose latest weights it samples from


@dataclass(slots=True)
class Session:
    """One client."""

    last_seen: float
    described: requests.CreateSession
    samplers: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the server trains and samples from.

    Attributes:
        names: names by which clients may ask for it, or patterns such as `Qwen/*`; the last is its own.
        architecture: `model_type` of its transformers configuration.
        vocabulary: number of token ids.
        max_tokens: longest sample that is trained, and longest context that is sampled.
        losses: further names of losses, and the losses that they stand for.
    """

    names: tuple[str, ...]
    architecture: str
    vocabulary: int
    max_tokens: int
    losses: Mapping[str, str] = field(default_factory=dict)


class Service:
    """The state of a server. Methods raise RequestError or UnknownPathError for what is refused."""

    def __init__(
        self,
        served: ServedModel,
        store: CheckpointStore,
        sequencer: Sequencer,
        samplers: Samplers,
        session_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.served, self.store = served, store
        self._sequencer, self._samplers = sequencer, samplers
        self._session_seconds, self._clock = session_seconds, clock
        self._sessions: dict[str, Session] = {}
        self._sampling: dict[str, Sampler] = {}
        self._results: dict[str, asyncio.Task[Result]] = {}
        self._ended: dict[str, float] = {}  # when each result was there, the earliest first
        self._latest: dict[str, Path] = {}  # by model: folder of its latest inflight weights

    # Sessions.

    def create_session(self, body: requests.CreateSession) -> str:
        """Add a session; returns its id."""
        session_id = secrets.token_hex(8)
        self._sessions[session_id] = Session(self._clock(), body)
        return session_id

    def session_ids(self) -> list[str]:
        """Return the sessions, the newest first."""
        return list(reversed(self._sessions))

    def touch(self, session_id: str) -> Session:
        """Note a sign of life. Raises GoneError if the session is over."""
        session = self.session(session_id)
        session.last_seen = self._clock()
        return session

    def session(self, session_id: str) -> Session:
        """Return a session. Raises GoneError if it is over."""
        if session_id not in self._sessions:
            raise GoneError(f"session {session_id!r} is over, or was of an earlier server")
        return self._sessions[session_id]

    def finish(self, session_id: str) -> None:
        """End a session: its models leave the trainer, checkpoints stay."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.models:
            self._sequencer.close(model_id, RemoveModel(model_id))
        self.store.delete_snapshots(session_id)
        for name in session.samplers:
            self._sampling.pop(name, None)
        for request_id in session.results:
            if (task := self._results.pop(request_id, None)) is not None:
                task.cancel()

    def tidy(self) -> None:
        """End the sessions without a sign of life; drop old results and expired checkpoints."""
        now = self._clock()
        while self._ended and now - next(iter(self._ended.values())) > _RESULT_SECONDS:
            request_id = next(iter(self._ended))
            del self._ended[request_id]
            self._results.pop(request_id, None)
            for session in self._sessions.values():
                session.results.discard(request_id)
        self.store.delete_expired()
        silent = [name for name, one in self._sessions.items() if now - one.last_seen > self._session_seconds]
        for name in silent:
            self.finish(name)

    # Results.

    def cancel(self, request_id: str) -> None:
        """End a request for samples; operations on models end by themselves."""
        session_id, kind, _ = (*request_id.split(":", 2), "", "")[:3]
        if kind == "sample" and session_id in self._sessions and (task := self._results.get(request_id)) is not None:
            task.cancel()

    def _start(self, session: Session, request_id: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> None:
        """Run `work` unless this request was submitted before."""
        if request_id not in self._results:
            session.results.add(request_id)
            task = self._results[request_id] = asyncio.ensure_future(work())
            task.add_done_callback(partial(self._note_end, request_id))

    def _note_end(self, request_id: str, task: asyncio.Task[Result]) -> None:
        self._ended[request_id] = self._clock()
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs an exception that was not retrieved

    async def result(self, request_id: str, seconds: float) -> Result | None:
        """Wait up to `seconds` for a result; None if it is not there yet. Raises GoneError if it is unknown."""
        task = self._results.get(request_id)
        if task is None:
            raise GoneError(f"request {request_id!r} is unknown")
        done, _ = await asyncio.wait([task], timeout=seconds)
        if task.cancelled():
            raise GoneError(f"request {request_id!r} ended with its session")
        return task.result() if done else None

    # Models.

    def create_model(self, body: requests.CreateModelBody) -> tuple[str, str]:
        """Add a model; returns the ids of the request and of the model."""
        session, model_id = self.touch(body.session_id), f"{body.session_id}:train:{body.model_seq_id}"
        self._check_base(body.base_model)
        lora = body.lora_config
        layers = {name: getattr(lora, name) for name in _LAYERS}
        # Without a seed, models of one session differ.
        seed = secrets.randbits(32) if lora.seed is None else lora.seed % 2**63
        operation = CreateModel(model_id, lora.rank, seed, **layers)
        record = {"base_model": body.base_model, "lora_rank": lora.rank, **layers}
        record["optimizer_config"] = body.optimizer_config.model_dump()
        content = {"model_id": model_id, "type": "create_model"}
        return self._add_model(session, operation, record, body.user_metadata, content)

    def create_from_checkpoint(self, body: requests.LoadBody) -> tuple[str, str]:
        """Add a model that starts from a checkpoint."""
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        session, model_id = self.touch(body.session_id), f"{body.session_id}:train:{body.model_seq_id}"
        path, folder = self.store.find(body.path)
        fields = read_fields(folder)
        if body.base_model not in (None, fields["base_model"]):
            raise RequestError(f"base_model: {body.path} is of {fields['base_model']}, not of {body.base_model}")
        self._check_optimizer(path, body.optimizer)
        kept = {name: fields[name] for name in ("base_model", "lora_rank", *_LAYERS)}
        kept["optimizer_config"] = body.optimizer_config.model_dump()
        layers = {name: fields[name] for name in _LAYERS}
        load = LoadWeights(model_id, str(folder), body.optimizer)
        operation = CreateModel(model_id, fields["lora_rank"], 0, **layers, load=load)
        content = {"model_id": model_id, "path": body.path, "type": "load_weights"}
        return self._add_model(session, operation, kept, body.user_metadata, content)

    def _add_model(
        self,
        session: Session,
        operation: CreateModel,
        record: dict[str, Any],
        metadata: Mapping[str, Any] | None,
        content: dict[str, Any],
    ) -> tuple[str, str]:
        model_id = operation.model_id
        if model_id not in session.models:
            self.store.add_model(model_id, {**record, "user_metadata": metadata, "created_at": time.time()})
            session.models.add(model_id)
        return self._submit(operation, 0, lambda _: content)

    def unload_model(self, model_id: str) -> tuple[str, str]:
        """Remove a model; its checkpoints stay."""
        request_id = f"{model_id}:unload"
        if request_id not in self._results:
            session = self._session_of(model_id)
            removed = self._sequencer.close(model_id, RemoveModel(model_id))
            session.models.discard(model_id)

            async def work() -> Result:
                _check(await removed)
                return {"model_id": model_id, "type": "unload_model"}

            self._start(session, request_id, work)
        return request_id, model_id

    def _session_of(self, model_id: str) -> Session:
        session = self.touch(model_id.partition(":")[0])
        if model_id not in session.models:
            raise RequestError(f"model_id: {model_id!r} does not exist")
        return session

    def _submit(self, operation: Operation, seq_id: int, finish: Callable[[Answer], Result]) -> tuple[str, str]:
        """Queue an operation, unless it was submitted before; returns the ids of the request and of the model."""
        model_id = operation.model_id
        session, request_id = self._session_of(model_id), f"{model_id}:{seq_id}"
        if request_id in self._results:
            return request_id, model_id
        future = self._sequencer.submit(model_id, seq_id, operation)

        async def work() -> Result:
            return finish(_check(await future))

        self._start(session, request_id, work)
        return request_id, model_id

    def forward_backward(self, body: bytes) -> tuple[str, str]:
        """Score samples, and add the gradient."""
        request = ScoringRequest(body, self.served.vocabulary, self.served.max_tokens, self.served.losses)
        return self._submit(request.operation, request.seq_id, request.answer)

    def optim_step(self, body: requests.OptimStepBody) -> tuple[str, str]:
        """Apply the accumulated gradients."""
        values = body.adam_params.model_dump(exclude={"type"})
        operation = OptimStep(body.model_id, **values)
        return self._submit(operation, body.seq_id, lambda answer: {"metrics": answer.metrics})

    def save_weights(self, body: requests.SaveBody) -> tuple[str, str]:
        """Save a checkpoint with the optimizer's state."""
        path = CheckpointPath(body.model_id, "weights", check_name(body.path))
        folder = self.store.folder(path)
        if folder.exists() and not body.overwrite and f"{body.model_id}:{body.seq_id}" not in self._results:
            raise RequestError(f"path: {path} exists already; set overwrite, or use another name")
        operation = self._save_operation(body, folder, with_optimizer=True)
        operation.overwrite = body.overwrite
        return self._submit(operation, body.seq_id, lambda _: {"path": str(path), "type": "save_weights"})

    def save_for_sampler(self, body: requests.SaveForSamplerBody) -> tuple[str, str]:
        """Save weights under a name, or for a sampling session."""
        request_id = f"{body.model_id}:{body.seq_id}"
        if body.path is not None:
            path = CheckpointPath(body.model_id, "sampler_weights", check_name(body.path))
            folder, answer = self.store.folder(path), {"path": str(path)}
            if folder.exists() and request_id not in self._results:
                raise RequestError(f"path: {path} exists already; use another name")
        elif body.sampling_session_seq_id is not None:
            folder = self.store.snapshot(body.model_id, body.seq_id)
            name = f"{body.model_id.partition(':')[0]}:sample:{body.sampling_session_seq_id}"
            answer = {"sampling_session_id": name}
        else:
            raise RequestError("save_weights_for_sampler needs path or sampling_session_seq_id")
        operation = self._save_operation(body, folder, with_optimizer=False)

        def finish(_: Answer) -> Result:
            if body.kind == "inflight":
                self._latest[body.model_id] = folder
            if body.path is None:
                base = self.store.model(body.model_id)["base_model"]
                follows = body.model_id if body.kind == "inflight" else None
                self._add_sampler(answer["sampling_session_id"], Sampler(base, folder, inflight_of=follows))
            return {**answer, "type": "save_weights_for_sampler"}

        return self._submit(operation, body.seq_id, finish)

    def _save_operation(
        self, body: requests.SaveBody | requests.SaveForSamplerBody, folder: Path, with_optimizer: bool
    ) -> SaveWeights:
        self._session_of(body.model_id)
        record = self.store.model(body.model_id)
        now = time.time()
        fields = {name: record[name] for name in ("base_model", "lora_rank", *_LAYERS)}
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        fields |= {"created_at": now, "expires_at": expires, "user_metadata": body.user_metadata}
        return SaveWeights(body.model_id, str(folder), with_optimizer, {"tinker": fields})

    def load_weights(self, body: requests.LoadBody) -> tuple[str, str]:
        """Load a checkpoint into a model, or into a new one."""
        if body.model_id is None or body.seq_id is None:
            return self.create_from_checkpoint(body)
        path, folder = self.store.find(body.path)
        self._check_optimizer(path, body.optimizer)
        operation = LoadWeights(body.model_id, str(folder), body.optimizer)
        content = {"path": body.path, "model_id": body.model_id, "type": "load_weights"}
        return self._submit(operation, body.seq_id, lambda _: content)

    def _check_optimizer(self, path: CheckpointPath, wanted: bool) -> None:
        if wanted and path.kind != "weights":
            raise RequestError(f"path: {path} has no state of an optimizer; load it with optimizer = false")

    def _check_base(self, name: str) -> None:
        patterns = (".*".join(map(re.escape, known.split("*"))) for known in self.served.names)
        if not any(re.fullmatch(pattern, name) for pattern in patterns):
            raise RequestError(f"base_model: {name!r} is not served; use {', '.join(self.served.names)}")

    # Sampling.

    def create_sampling_session(self, body: requests.CreateSamplingSessionBody) -> str:
        """Add a sampler of the base model, or of saved weights."""
        self.touch(body.session_id)
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if body.model_path is not None:
            _, folder = self.store.find(body.model_path)
            base = read_fields(folder)["base_model"]
            self._add_sampler(name, Sampler(base, folder, body.model_path))
        elif body.base_model is not None:
            self._check_base(body.base_model)
            self._add_sampler(name, Sampler(body.base_model))
        else:
            raise RequestError("create_sampling_session needs base_model or model_path")
        return name

    def sampler(self, name: str) -> Sampler:
        """Return a sampler. Raises GoneError."""
        if name not in self._sampling:
            raise GoneError(f"sampling session {name!r} is over, or was of an earlier server")
        return self._sampling[name]

    def _add_sampler(self, name: str, sampler: Sampler) -> None:
        self._sampling[name] = sampler
        self._sessions[name.partition(":")[0]].samplers.add(name)

    def sample(self, body: requests.SampleBody) -> tuple[str, list[str]]:
        """Sample completions; returns the ids of the request and of the sequences."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise RequestError("asample needs sampling_session_id and seq_id")
        if body.record_stability_info and STABLE not in self.served.losses:
            raise RequestError(f"record_stability_info is for the loss {STABLE}, which is not supported; {NO_FORMULA}")
        sampler = self.sampler(body.sampling_session_id)
        session = self.touch(body.sampling_session_id.partition(":")[0])
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        completion = self._completion(body, prompt)
        folder = sampler.folder if sampler.inflight_of is None else self._latest[sampler.inflight_of]

        async def work() -> Result:
            answer = await self._samplers.sample(folder, completion)
            return to_response(answer, prompt, body.topk_prompt_logprobs)

        self._start(session, request_id, work)
        return request_id, [f"{request_id}:{index}" for index in range(body.num_samples)]

    def _completion(self, body: requests.SampleBody, prompt: list[int]) -> dict[str, Any]:
        """Return the request for the inference server."""
        params, room = body.sampling_params, self.served.max_tokens - len(prompt)
        if not prompt or not all(0 <= token < self.served.vocabulary for token in prompt):
            raise RequestError(
                f"prompt: it is empty, or has a token outside the vocabulary of {self.served.vocabulary}"
            )
        if room < (params.max_tokens or 1):
            raise RequestError(
                f"prompt: {len(prompt)} tokens and max_tokens = {params.max_tokens or 1} exceed the context of "
                f"{self.served.max_tokens}"
            )
        completion: dict[str, Any] = {
            "prompt": prompt,
            "n": body.num_samples,
            "max_tokens": params.max_tokens or room,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": None if params.seed is None else params.seed % 2**63,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if params.stop is not None:
            stop = [params.stop] if isinstance(params.stop, str) else params.stop
            completion["ignore_eos"] = True
            kind = "stop_token_ids" if stop and isinstance(stop[0], int) else "stop"
            completion |= {kind: stop, "include_stop_str_in_output": True}
        if body.prompt_logprobs or body.topk_prompt_logprobs:
            completion["prompt_logprobs"] = body.topk_prompt_logprobs
        return completion


class OperationError(Exception):
    """The trainer refused or failed an operation."""

    def __init__(self, message: str, is_user_error: bool) -> None:
        super().__init__(message)
        self.is_user_error = is_user_error


def _check(answer: Answer) -> Answer:
    if answer.error is not None:
        raise OperationError(answer.error, answer.is_user_error)
    return answer
