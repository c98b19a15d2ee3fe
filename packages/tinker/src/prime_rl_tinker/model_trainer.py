"""Executes operations on models: adapters over one frozen policy, each with its optimizer and accumulated gradients."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from prime_rl.configs.training.model import LoRAConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error
from prime_rl.storage.artifact import WEIGHTS_FORMAT, publish_artifact
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from prime_rl.storage.weights.canary import canary_tokens
from prime_rl.trainer.adapter_engine import Job, run_jobs, sum_gradients, update
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.micro_batch import TargetRow
from prime_rl.trainer.model.lora import Adapter, adapter_rooms
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.parallel.process_group import RankConsensus, World
from prime_rl.trainer.weight_sync.publisher import canary_row, measure_canary
from prime_rl.trainer.weights.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_name
from prime_rl.trainer.weights.policy_loading import make_policy
from prime_rl_tinker.checkpoint_store import NEW, OLD
from prime_rl_tinker.losses import LOSSES
from prime_rl_tinker.messages import (
    Answer,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    RemoveModel,
    Sample,
    SaveWeights,
)

OPTIMIZER_STATE = "optimizer.state"
"""File of a checkpoint, in the format of safetensors; its name keeps the inference server from reading it."""
ALPHA = 32.0
"""Scale of every adapter is ALPHA / rank, as in Tinker."""
_ATTENTION = ("attn", "attention")
"""Parts of the names of modules whose layers `train_attn` selects."""


@dataclass(slots=True)
class Model:
    """One model: {adapter, optimizer, accumulated gradients}."""

    adapter: Adapter
    optimizer: AdamW
    has_gradients: bool = False
    num_failed: int = 0  # passes since the last step whose gradient was left out


@dataclass(slots=True)
class _ScoringJob:
    """The rows of one `ForwardBackward`: samples packed in their order, at most `max_tokens` in a row."""

    request: ForwardBackward
    device: torch.device
    max_tokens: int
    rows: list[list[int]] = field(init=False)  # indices of samples
    logprobs: dict[int, bytes] = field(default_factory=dict)  # by sample; of this rank's rows
    loss: float = 0.0  # of this rank's rows

    def __post_init__(self) -> None:
        self.rows, free = [], 0
        for index, sample in enumerate(self.request.samples):
            length = len(sample.tokens) // 8
            if length > free:
                self.rows.append([])
                free = self.max_tokens
            self.rows[-1].append(index)
            free -= length

    @property
    def costs(self) -> list[float]:
        """Tokens of each row."""
        return [sum(len(self.request.samples[index].tokens) / 8 for index in row) for row in self.rows]

    def compute(self, policy: PolicyModel, row: int | None) -> Tensor:
        """Return the loss of a row, and store its log-probabilities."""
        samples = [_PADDING] if row is None else [self.request.samples[index] for index in self.rows[row]]
        (logprobs,) = policy(_target_row(samples).to(self.device))
        if row is None:
            return logprobs.sum() * 0.0
        loss = LOSSES[self.request.loss_fn]
        arrays = {
            name: torch.from_numpy(np.concatenate([_floats(sample.arrays[name]) for sample in samples])).to(self.device)
            for name in (*loss.inputs, *loss.optional)
        }
        total = loss.compute(logprobs, arrays, self.request.options).sum()
        values = logprobs.detach().cpu().numpy()
        lengths = [len(sample.targets) // 8 for sample in samples]
        for index, part in zip(self.rows[row], np.split(values, np.cumsum(lengths)[:-1]), strict=True):
            self.logprobs[index] = part.tobytes()
        self.loss += total.item()
        return total


class ModelTrainer:
    """The models of a server, on all ranks. Every rank executes the same operations in the same order."""

    def __init__(self, config: TrainerModelConfig, world: World, on_row: Callable[[], None] = lambda: None) -> None:
        """Load the model; a collective call. `on_row` is called after each forward pass."""
        assert config.lora is not None
        self._config, self._world, self._lora, self._on_row = config, world, config.lora, on_row
        self._policy = make_policy(config, 0, world, shared=True)
        self._rooms = adapter_rooms(self._policy)
        self._models: dict[str, Model] = {}
        self._ranks = RankConsensus(world, torch.distributed.group.WORLD)
        self._canary_row = canary_row(self._policy.vocabulary).to(world.device)
        self._base_logprobs = measure_canary(self._policy, self._canary_row)()

    def execute(self, operations: Sequence[Operation]) -> list[Answer]:
        """Execute operations of different models; passes of the same kind run together. Returns answers in order."""
        answers: dict[int, Answer] = {}
        for forward_only in (False, True):
            passes = {
                index: operation
                for index, operation in enumerate(operations)
                if isinstance(operation, ForwardBackward) and operation.forward_only == forward_only
            }
            answers |= self._score(passes, forward_only)
        for index, operation in enumerate(operations):
            if index not in answers:
                try:
                    answers[index] = self._apply(operation)
                except (ConfigError, RunError) as error:
                    answers[index] = Answer(str(error), isinstance(error, ConfigError))
        return [answers[index] for index in range(len(operations))]

    def _apply(self, operation: Operation) -> Answer:
        match operation:
            case CreateModel():
                self._create(operation)
            case OptimStep():
                return Answer(metrics=self._step(operation))
            case SaveWeights():
                self._save(operation)
            case LoadWeights():
                self._load(self._model(operation.model_id), operation)
            case RemoveModel():
                self._models.pop(operation.model_id, None)
        return Answer()

    def _model(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise ConfigError(f"model {model_id!r} does not exist; its session may have ended")
        return self._models[model_id]

    def _create(self, request: CreateModel) -> None:
        if request.rank > self._lora.rank:
            raise ConfigError(f"rank {request.rank} is larger than the server's maximum, {self._lora.rank}")
        head = self._policy.causal_lm.get_output_embeddings()

        def kind_of(name: str) -> str:
            if self._rooms[name] is head:
                return "train_unembed"
            return "train_attn" if any(part in name for part in _ATTENTION) else "train_mlp"

        wanted = {flag for flag in ("train_attn", "train_mlp", "train_unembed") if getattr(request, flag)}
        if not wanted:
            raise ConfigError("lora_config excludes every layer")
        if "train_mlp" in wanted and any(parameter.ndim > 2 for parameter in self._policy.parameters()):
            raise ConfigError("lora_config.train_mlp: the experts of this model get no adapter; set train_mlp to false")
        if missing := sorted(wanted - {kind_of(name) for name in self._rooms}):
            raise ConfigError(f"lora_config.{missing[0]}: this model has no such layer; set {missing[0]} to false")
        rooms = {name: layer for name, layer in self._rooms.items() if kind_of(name) in wanted}
        config = LoRAConfig(rank=request.rank, alpha=ALPHA)
        adapter = Adapter(rooms, config, request.seed, self._world.device)
        model = Model(adapter, AdamW(adapter.parameters, fused=True))
        if request.load is not None:
            self._load(model, request.load)
        self._models[request.model_id] = model

    def _score(self, passes: dict[int, ForwardBackward], forward_only: bool) -> dict[int, Answer]:
        known = {index: request for index, request in passes.items() if request.model_id in self._models}
        answers = {
            index: Answer(f"model {request.model_id!r} does not exist; its session may have ended", True)
            for index, request in passes.items()
            if index not in known
        }
        if not known:
            return answers
        scorings = {
            index: _ScoringJob(request, self._world.device, self._config.seq_len) for index, request in known.items()
        }
        models = {index: self._models[request.model_id] for index, request in known.items()}
        jobs = [Job(models[index].adapter, job.costs, job.compute) for index, job in scorings.items()]
        # The sum so far is set aside: a pass without a finite gradient must not spoil it.
        earlier = {index: [] if forward_only else _take_gradients(model.adapter) for index, model in models.items()}
        run_jobs(self._policy, self._world, jobs, not forward_only, self._on_row)
        norms = [0.0 if forward_only else _gradient_norm(models[index].adapter) for index in known]
        gathered = self._ranks.gather(
            lambda: [(job.logprobs, job.loss, norm) for job, norm in zip(scorings.values(), norms, strict=True)]
        )
        for number, index in enumerate(known):
            parts = [rank[number] for rank in gathered]
            logprobs = {sample: values for found, _, _ in parts for sample, values in found.items()}
            loss, norm = sum(loss for _, loss, _ in parts), sum(norm for _, _, norm in parts)
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            if not forward_only:
                _add_gradients(models[index].adapter, earlier[index], is_finite)
                models[index].has_gradients |= is_finite
                models[index].num_failed += not is_finite
            if is_finite:
                ordered = [logprobs[sample] for sample in range(len(known[index].samples))]
                answers[index] = Answer(logprobs=ordered, metrics={"loss:sum": loss})
            else:
                answers[index] = Answer(
                    f"the loss ({loss}) or its gradient is not finite, and is left out; check logprobs and advantages",
                    is_user_error=True,
                )
        return answers

    def _step(self, request: OptimStep) -> dict[str, float]:
        model = self._model(request.model_id)
        failed, model.num_failed = float(model.num_failed), 0
        if not model.has_gradients:
            return {"grad_norm": 0.0, "update_norm": 0.0, "skipped": 1.0, "failed_passes": failed}
        (group,) = model.optimizer.param_groups
        group |= {"lr": request.learning_rate, "betas": (request.beta1, request.beta2)}
        group |= {"eps": request.eps, "weight_decay": request.weight_decay}
        before = [factor.detach().clone() for factor in model.adapter.parameters]
        norm = sum_gradients(model.adapter, self._world)
        applied = update(model.adapter, model.optimizer, norm, request.grad_clip_norm or math.inf)
        model.has_gradients = False
        changes = torch._foreach_sub([factor.detach() for factor in model.adapter.parameters], before)
        moved = get_total_norm(changes).item()
        metrics = {"grad_norm": norm if applied else 0.0, "update_norm": moved, "skipped": float(not applied)}
        return metrics | {"failed_passes": failed}

    def _save(self, request: SaveWeights) -> None:
        model = self._model(request.model_id)
        with model.adapter.activate():
            logprobs = measure_canary(self._policy, self._canary_row)()
        self._ranks.on_main(lambda: self._write(model, request, logprobs))

    def _write(self, model: Model, request: SaveWeights, logprobs: list[float]) -> None:
        """Write an adapter in peft's format, as the trainer of a run publishes it."""
        config = json.dumps(self._peft_config(model.adapter), indent=2).encode()
        dtype = str(compute_dtype(self._config.dtype, self._world.device)).removeprefix("torch.")
        tokens = [int(token) for token in canary_tokens(self._policy.vocabulary)]
        canary = {"token_ids": tokens, "logprobs": logprobs, "dtype": dtype, "base_logprobs": self._base_logprobs}

        def write(temporary: Path) -> dict[str, Any]:
            save_file(_named_factors(model.adapter), temporary / ADAPTER_WEIGHTS)
            (temporary / ADAPTER_CONFIG).write_bytes(config)
            if request.with_optimizer:
                save_file(_optimizer_state(model), temporary / OPTIMIZER_STATE)
            tensors = hash_tensors(temporary)
            fields = {"format": WEIGHTS_FORMAT, "branch": 0, "step": 0, "tensors": tensors, "canary": canary}
            digests = {"hash": content_hash(tensors), "adapter": xxhash.xxh3_128_hexdigest(config)}
            return {**fields, **digests, **request.fields}

        target = Path(request.directory)
        if not request.overwrite:
            publish_artifact(target, write)
            return
        new, old = (target.with_name(f"{prefix}{target.name}") for prefix in (NEW, OLD))
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        publish_artifact(new, write)
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def _peft_config(self, adapter: Adapter) -> dict[str, Any]:
        name = self._policy.causal_lm.config.name_or_path
        base = {"base_model_name_or_path": name, "revision": self._policy.revision}
        common = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **base}
        scale = {"r": adapter.config.rank, "lora_alpha": adapter.config.alpha, "lora_dropout": 0.0, "bias": "none"}
        return {**common, **scale, "target_modules": sorted(adapter.factors), "inference_mode": True}

    def _load(self, model: Model, request: LoadWeights) -> None:
        directory, files = Path(request.directory), [ADAPTER_WEIGHTS, OPTIMIZER_STATE][: 1 + request.with_optimizer]
        read: dict[str, dict[str, Tensor]] = {}

        def read_files() -> None:
            with translate_error(SafetensorError, lambda error: RunError(f"{directory} is damaged: {error}")):
                read.update((name, load_file(directory / name)) for name in files)

        self._ranks.gather(read_files)  # the folder may have been deleted since the request
        tensors = read[ADAPTER_WEIGHTS]
        named = _named_factors(model.adapter)
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in named.items()}:
            raise ConfigError(f"{directory} has other layers or another rank than model {request.model_id!r}")
        with torch.no_grad():
            for name, factor in named.items():
                factor.copy_(tensors[name])
        model.optimizer.state.clear()
        model.optimizer.zero_grad(set_to_none=True)
        model.has_gradients = False
        if request.with_optimizer:
            state = read[OPTIMIZER_STATE]
            for name, factor in _named_parameters(model.adapter).items():
                keys = {
                    key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")
                }
                if keys:
                    device = factor.device
                    model.optimizer.state[factor] = {key: value.to(device) for key, value in keys.items()}


_PADDING = Sample(
    tokens=np.zeros(1, np.int64).tobytes(),
    positions=np.zeros(1, np.int64).tobytes(),
    targets=np.zeros(1, np.int64).tobytes(),
    arrays={},
)


def _target_row(samples: Sequence[Sample]) -> TargetRow:
    tokens = [_integers(sample.tokens) for sample in samples]
    lengths = [len(part) for part in tokens]
    starts = np.cumsum([0, *lengths])
    positions = [_integers(sample.positions) + start for sample, start in zip(samples, starts, strict=False)]
    return TargetRow(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        boundaries=torch.from_numpy(starts.astype(np.int32)),
        longest=max(lengths),
        positions=torch.from_numpy(np.concatenate(positions)),
        targets=torch.from_numpy(np.concatenate([_integers(sample.targets) for sample in samples])),
    )


def _take_gradients(adapter: Adapter) -> list[Tensor | None]:
    """Remove the gradients, and return them."""
    taken = [factor.grad for factor in adapter.parameters]
    for factor in adapter.parameters:
        factor.grad = None
    return taken


def _add_gradients(adapter: Adapter, earlier: Sequence[Tensor | None], keep: bool) -> None:
    """Add the gradients that were taken to those of a pass, or discard the latter."""
    for factor, old in zip(adapter.parameters, earlier, strict=True):
        if not keep or factor.grad is None:
            factor.grad = old
        elif old is not None:
            factor.grad += old


def _gradient_norm(adapter: Adapter) -> float:
    """Return the norm of this rank's gradients."""
    return get_total_norm([factor.grad for factor in adapter.parameters if factor.grad is not None]).item()


def _named_parameters(adapter: Adapter) -> dict[str, torch.nn.Parameter]:
    return {
        peft_name(layer, name): factor
        for layer, pair in adapter.factors.items()
        for name, factor in zip(("lora_A", "lora_B"), pair, strict=True)
    }


def _named_factors(adapter: Adapter) -> dict[str, Tensor]:
    return {name: factor.detach() for name, factor in _named_parameters(adapter).items()}


def _optimizer_state(model: Model) -> dict[str, Tensor]:
    """Return `<factor>/<key>` -> value."""
    return {
        f"{name}/{key}": value
        for name, factor in _named_parameters(model.adapter).items()
        for key, value in model.optimizer.state.get(factor, {}).items()
    }


def _integers(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64)


def _floats(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, np.float32)
