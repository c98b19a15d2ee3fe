"""Memory and speed of the trainer on one GPU, from sizes and a few efficiencies.

Memory is the largest of three moments of a step: the output head, the first block of the backward pass, the update. The
bytes are those of docs/design/memory.md; only `_WORKING` is fitted, to upstream's published peaks.

Speed is a roofline: matrix products and attention at a share of the GPU's peak FLOP/s, all other operators at a share
of its memory bandwidth. The constants below fit upstream prime-rl's published steps (`published_figures`), because this
project's trainer has not been measured on a GPU. Its own output head reads and writes fewer bytes, so that a plan is
rather too slow. `TrainerJob.upstream` plans what upstream does differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from prime_rl.configs.training.model import DEFAULT_TARGETS, EXPERTS, TrainerModelConfig
from prime_rl.configs.training.optim import OptimConfig
from prime_rl.supervisor.planning.gpu_table import FA2_ON_HOPPER, GIB, NODE, Gpu
from prime_rl.supervisor.planning.model_shape import ModelShape

# Memory.
_COMPILED = 1.6  # bytes that a compiled block saves, relative to its matrix products
_WORKING = 3.13  # the same for a compiled block that is recomputed and differentiated
_EAGER_WORKING = 2.0  # of an eager block, relative to what it saves
_LOGIT_BYTES = 6  # float32, and its gradient in bfloat16
_UPSTREAM_LOGIT_BYTES = 17  # of upstream's sft: logits, a copy in float32, its softmax, and two gradients
_LOGITS = 2**28  # as in prime_rl.trainer.model.lm_head
_OFFLOADED_PARTS = 3 * 256 * 2**20  # parameters whose optimizer state is on the device at the same time
# Speed.
_MATMUL = 0.55  # share of the peak FLOP/s
_BANDWIDTH = 0.8  # share of the memory's bandwidth
_LINK = 0.75  # share of a link's or the network's bandwidth
_PASS = 13  # bytes read and written by other operators in a pass over a block, relative to its matrix products
_EAGER_PASS = 1.5 * _PASS  # assumed
_HEAD_BYTES = 180  # read and written for each logit
_UPSTREAM_SFT_HEAD_BYTES = 40  # of upstream's sft, which computes no log-probabilities and entropies
_ADAPTER_SECONDS = 2.2e-3  # for each adapted layer and row
_ROW_SECONDS = 0.05
_HIDDEN = 0.5  # share of communication that computation hides
_UPDATE_BYTES = 40  # read and written for each parameter: norm, clipping and AdamW
_HOST_UPDATE_SECONDS = 1e-9  # for each parameter that is updated on the CPU


@dataclass(frozen=True)
class TrainerJob:
    """What the trainer computes in a step.

    Attributes:
        shape: the model.
        gpu: its GPUs.
        ranks: their number.
        model: its settings.
        optim: its optimizer.
        row_tokens: tokens of a row.
        sample_tokens: tokens of each of the samples in a row.
        step_tokens: tokens of a batch; None is one row for each group of ranks.
        element: bytes of an element in forward and backward pass: 2 in bfloat16, 4 in float32.
        upstream: plan upstream prime-rl's trainer: float32 weights below adapters, which experts have too, and whole
            logits in `sft`.
        is_sft: supervised fine-tuning.
        publication_bytes: device buffers of rank 0 for the transport of versions.
        has_reference: a frozen reference model scores each row, too.
    """

    shape: ModelShape
    gpu: Gpu
    ranks: int
    model: TrainerModelConfig
    optim: OptimConfig
    row_tokens: int
    sample_tokens: float
    step_tokens: float | None = None
    element: int = 2
    upstream: bool = False
    is_sft: bool = False
    publication_bytes: float = 0.0
    has_reference: bool = False

    @property
    def cp(self) -> int:
        """Ranks that share a row."""
        return self.model.cp.degree if self.model.cp else 1

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, with different rows. Raises ValueError if `ranks` cannot be divided so."""
        return self.model.dp_replicate * self.model.sharding_ranks(self.ranks)

    @property
    def shards(self) -> int:
        """Ranks that divide each tensor."""
        return self.data_ranks // self.model.dp_replicate * self.cp

    @cached_property
    def adapters(self) -> list[int]:
        """Inputs and outputs of each layer with an adapter; the experts of a block count as three layers."""
        lora, sizes = self.model.lora, list[int]()
        if lora is None:
            return sizes
        for block in self.shape.blocks:
            layers = {"o_proj": block.hidden + block.output}
            if block.query == block.output:  # latent attention has layers of other names
                keys = block.hidden + block.key_value
                layers |= {"q_proj": block.hidden + block.query, "k_proj": keys, "v_proj": keys}
            if block.width:
                layers |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), block.hidden + block.width)
            named = {*lora.target_modules}
            sizes += [size for name, size in layers.items() if name in named or named - {*DEFAULT_TARGETS, EXPERTS}]
            if (self.upstream or EXPERTS in named) and block.chosen:
                width = block.expert_width // block.chosen
                sizes += 3 * [block.experts // (3 * block.hidden * width) * (block.hidden + width)]
        return sizes

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return self.shape.parameters if self.model.lora is None else self.model.lora.rank * sum(self.adapters)

    def share(self, dense: float, other: float) -> float:
        """Return the part of one rank: `dense` in the blocks is divided by tensor parallelism as well."""
        return (dense / self.model.tp + other) / self.shards

    @property
    def own_parameters(self) -> float:
        """Parameters of one rank."""
        dense = self.shape.body - self.shape.experts
        return self.share(dense, self.shape.parameters - dense)

    @property
    def own_trained(self) -> float:
        """Trained parameters of one rank."""
        return self.own_parameters if self.model.lora is None else self.trained / self.shards

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.step_tokens or self.row_tokens * self.data_ranks

    @property
    def rows(self) -> float:
        """Rows of a group of ranks in a step; with few tokens the only one is not full."""
        return max(1.0, self.tokens / self.row_tokens / self.data_ranks)


def state_bytes(optim: OptimConfig, shape: ModelShape, is_lora: bool) -> float:
    """Return the bytes of optimizer state for each trained parameter, float32."""
    if optim.type == "adamw":
        return 8
    if optim.type == "sgd":
        return 4 if optim.momentum else 0
    matrices = 1.0 if is_lora else (shape.body - len(shape.blocks) * 2 * shape.hidden) / shape.parameters
    return 4 * matrices + 8 * (1 - matrices)


def trainer_memory(job: TrainerJob) -> dict[str, float]:
    """Return the GiB of one GPU by part, at the moment of a step that needs most; ValueError as `data_ranks`."""
    model, shape, is_lora = job.model, job.shape, job.model.lora is not None
    on_device = not model.fsdp_cpu_offload
    base = 4
    if model.lora is not None:
        base = 4 if job.upstream or model.lora.base_dtype == "float32" else job.element
    parts = {
        "weights": on_device * (base * job.own_parameters + (4 * job.own_trained if is_lora else 0)),
        "gradients": on_device * 4 * job.own_trained,
        "optimizer": on_device * state_bytes(job.optim, shape, is_lora) * job.own_trained,
    }
    if job.has_reference:
        parts["reference weights"] = on_device * job.element * job.own_parameters
    parts["publication buffers"] = job.publication_bytes
    offloaded = min(parts["optimizer"], 2 * _OFFLOADED_PARTS)
    if model.reduce_gradients_once and job.rows > 1 and not is_lora:
        parts["gradients"] += 4 * shape.parameters / model.tp
    update = {**parts, "optimizer": offloaded if model.optim_cpu_offload else parts["optimizer"]}
    if model.optim_cpu_offload:
        parts["optimizer"] = 0.0
    block = shape.largest_block
    gathered = (block.parameters - block.experts) / model.tp + block.experts / model.ep
    whole = (shape.body - shape.experts) / model.tp + shape.experts / model.ep
    parts["gathered weights"] = job.element * (
        (2 * gathered if model.reshard_after_forward else whole) + shape.embedding
    )
    if not is_lora:  # whole gradients, and their copy in float32 for the reduction
        parts["gathered weights"] += (job.element + 4) * (gathered + shape.embedding)
    stored, working = activation_bytes(job)
    head = _head_bytes(job)
    moments = (
        {**parts, "activations": stored, "block at work": working, "LM head": 0.0},
        {**parts, "activations": stored, "block at work": 0.0, "LM head": head},
        update,
    )
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size / GIB for name, size in peak.items()}


def host_memory(job: TrainerJob) -> float:
    """Return the GiB of host memory that a node needs for offloading and a version (docs/scaling.md)."""
    model, state = job.model, state_bytes(job.optim, job.shape, job.model.lora is not None)
    ranks = min(job.ranks, NODE)
    own = state * model.optim_cpu_offload * job.own_trained
    own += model.fsdp_cpu_offload * (4 * job.own_parameters + (4 + state) * job.own_trained)
    if model.ac_offloading is not None:
        own += activation_bytes(replace(job, model=model.model_copy(update={"ac_offloading": None})))[0]
    return ranks * (own + 2 * job.shape.parameters / job.ranks) / GIB


def activation_bytes(job: TrainerJob) -> tuple[float, float]:
    """Return what all blocks save for the backward pass, and what one block at work needs in addition, in bytes."""
    model, element, blocks = job.model, job.element, job.shape.blocks
    tokens = job.row_tokens / job.cp
    eager = [block.eager_bytes(element) for block in blocks]
    products = [element * block.products for block in blocks]
    plain = eager if model.compile is None else [_COMPILED * size for size in products]
    worst = max(range(len(blocks)), key=lambda layer: plain[layer])
    working = _EAGER_WORKING * eager[worst] if model.compile is None else _WORKING * products[worst]
    kept = list[float]()
    for layer, block in enumerate(blocks):
        if model.ac is None or layer % model.ac.freq:
            kept.append(plain[layer] / model.tp if model.tp > 1 else plain[layer])
        else:
            kept.append(element * block.hidden if model.ac.mode == "full" else products[layer] / model.tp)
    if model.ac is None:
        working -= plain[worst]  # it is saved already
    stored = sum(kept) + (4 + element) * job.shape.hidden  # the last norm
    if model.ac_offloading is not None:
        largest = element * max(block.hidden for block in blocks)
        stored = min(stored, model.ac_offloading.max_inflight_activations * largest)
    return tokens * stored, tokens * max(0.0, working) / model.tp


def _head_bytes(job: TrainerJob) -> float:
    tokens, vocabulary = job.row_tokens / job.cp, job.shape.vocabulary
    if job.upstream and job.is_sft:
        return _UPSTREAM_LOGIT_BYTES * tokens * vocabulary
    chunk = job.model.logprob_chunk_size or max(1, _LOGITS // vocabulary)
    return _LOGIT_BYTES * min(tokens, chunk) * vocabulary + (4 + job.element) * tokens * job.shape.hidden


def trainer_seconds(job: TrainerJob) -> dict[str, float]:
    """Return the seconds of a step by part; ValueError as `data_ranks`."""
    model, shape, gpu = job.model, job.shape, job.gpu
    tokens = job.tokens / job.rows / job.data_ranks / job.cp  # of a row
    recomputed = 1 / model.ac.freq if model.ac is not None and model.ac.mode == "full" else 0.0
    backward = 1 if model.lora is not None else 2
    forward = shape.cost.body / 3 * tokens / model.tp
    head = shape.cost.head / 3 * tokens
    extra = recomputed + job.has_reference  # forward passes
    products = forward * (1 + backward + extra)
    products += head * (1 + backward + job.has_reference + (0 if job.upstream and job.is_sft else 1))
    scores = _score_flops(job) * tokens / model.tp * (3.5 + extra)
    bandwidth = _BANDWIDTH * gpu.bandwidth
    per_pass = _EAGER_PASS if model.compile is None else _PASS
    touched = per_pass * job.element * sum(block.products for block in shape.blocks) * tokens / model.tp
    per_logit = _UPSTREAM_SFT_HEAD_BYTES if job.upstream and job.is_sft else _HEAD_BYTES
    attention = FA2_ON_HOPPER if model.attn == "flash_attention_2" and gpu.name in ("H100", "H200") else gpu.attention
    seconds = {
        "matrix products": products / (_MATMUL * gpu.flops),
        "attention": scores / (attention * gpu.flops),
        "other operators": touched * (2 + extra) / bandwidth,
        "LM head": per_logit * shape.vocabulary * tokens / bandwidth,
        "adapters": _ADAPTER_SECONDS * len(job.adapters),
        "overhead": _ROW_SECONDS,
    }
    if model.ac_offloading is not None:
        kept = replace(job, model=model.model_copy(update={"ac_offloading": None}))
        seconds["offloading"] = 2 * activation_bytes(kept)[0] / gpu.host
    if model.fsdp_cpu_offload:
        seconds["offloading"] = seconds.get("offloading", 0.0) + (2 * 2 + 4) * job.own_parameters / gpu.host
    communication = communication_seconds(job)
    seconds["communication"] = communication - _HIDDEN * min(communication, sum(seconds.values()))
    seconds = {name: size * job.rows for name, size in seconds.items()}
    seconds["update"] = _UPDATE_BYTES * job.own_trained / bandwidth
    if model.optim_cpu_offload:
        seconds["update"] += 2 * state_bytes(job.optim, shape, model.lora is not None) * job.own_trained / gpu.host
    if model.fsdp_cpu_offload:
        seconds["update"] = _HOST_UPDATE_SECONDS * job.own_trained * min(job.ranks, NODE)
    return seconds


def _score_flops(job: TrainerJob) -> float:
    """FLOPs per token of the forward pass for pairs of tokens."""
    cost, length = job.shape.cost, max(1, round(job.sample_tokens))
    pairs = float(cost(np.array([length]), np.array([0]))[0]) - cost.body * length
    return pairs / 3 / length


def communication_seconds(job: TrainerJob) -> float:
    """Return the seconds of collectives for a row, if nothing hides them.

    Weights are gathered twice (once without resharding) and gradients reduced once, over the ranks that shard them;
    context, tensor and expert parallelism exchange states in every pass.
    """
    model, shape, gpu, element = job.model, job.shape, job.gpu, job.element
    tokens, passes = job.row_tokens / job.cp, 3 if model.ac is not None else 2
    shards, neighbours = job.shards, job.shards * model.tp
    dense = (shape.body - shape.experts) / model.tp + shape.parameters - shape.body
    gathered = dense + shape.experts / model.ep
    reduce_bytes = 4 if model.reduce_dtype == "float32" else 2
    reduced = (gathered if model.lora is None else job.trained) * reduce_bytes
    reduced /= job.rows if model.reduce_gradients_once else 1
    amount = (element * gathered * (2 if model.reshard_after_forward else 1) + reduced) * (shards - 1) / shards
    seconds = amount / _rate(gpu, neighbours)
    if model.dp_replicate > 1:
        seconds += 2 * reduced / shards / _rate(gpu, job.ranks)
    states = element * tokens * passes
    exchanged: Mapping[int, float] = {
        job.cp: sum(block.query + block.output + 2 * block.key_value for block in shape.blocks),
        model.tp * job.cp if model.tp > 1 else 1: sum(4 * block.hidden for block in shape.blocks),
    }
    for group, width in exchanged.items():
        seconds += states * width * (group - 1) / group / _rate(gpu, group)
    routed = sum(2 * block.chosen * block.hidden for block in shape.blocks)
    return seconds + states * routed * (model.ep - 1) / model.ep / _rate(gpu, model.ep)


def _rate(gpu: Gpu, group: int) -> float:
    """Bytes/s of a collective over a group of neighbouring ranks."""
    return _LINK * (gpu.link if group <= NODE else gpu.network)
