"""Memory and speed of vLLM on one GPU: weights, KV cache and decoding.

Decoding reads all weights (of experts those that any token of the batch chose) and the KV cache of every sequence for
each token; the efficiencies are assumptions, no published figures calibrate them.
"""

from dataclasses import dataclass

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import ConfigError
from prime_rl.supervisor.planning.gpu_table import GIB, Gpu
from prime_rl.supervisor.planning.model_shape import ModelShape

_BANDWIDTH, _MATMUL = 0.75, 0.5
_STEP_SECONDS, _REDUCTION_SECONDS = 2e-3, 15e-6  # overhead of a step, and of a reduction over the ranks
_CONTEXT_GIB, _GRAPHS_GIB = 1.0, 1.0  # CUDA context and libraries; CUDA graphs
_SEQUENCES, _BATCHED_TOKENS = (256, 1024), (2048, 8192)  # vLLM's defaults: on GPUs below 70 GiB and A100, on others


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """What the servers do.

    Attributes:
        shape: the model.
        gpu: the GPUs.
        num_gpus: their number.
        config: the server's settings.
        prompt_tokens: mean tokens of a prompt.
        completion_tokens: mean tokens of a completion.
        longest: tokens of the longest completion.
        group: rollouts of a prompt, which share its KV cache.
        in_flight: rollouts that the orchestrator has started at the same time.
    """

    shape: ModelShape
    gpu: Gpu
    num_gpus: int
    config: InferenceConfig
    prompt_tokens: float
    completion_tokens: float
    longest: float
    group: int
    in_flight: float

    @property
    def tp(self) -> int:
        """GPUs of a copy of the model."""
        return self.config.parallel.tp

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return max(1, self.num_gpus // self.tp)

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on a GPU; expert parallelism divides the experts over all copies of a server."""
        spread = self.tp * (self.config.parallel.dp if self.config.vllm.get("enable_expert_parallel") else 1)
        dense = self.shape.parameters - self.shape.experts
        return self.element * (dense / self.tp + self.shape.experts / spread)

    def cache_bytes(self, tokens: float) -> float:
        """Bytes of a sequence's KV cache on a GPU. More ranks than heads hold copies; latent attention is whole."""
        block = self.shape.blocks[0]
        parts = 1 if block.cache < block.key_value else self.tp
        return self.element * self.shape.cache_elements(tokens) / parts

    @property
    def model_length(self) -> int:
        """Longest sequence."""
        return self.config.model.max_model_len or self.shape.longest


def inference_memory(job: InferenceJob) -> dict[str, float]:
    """Return the GiB of one GPU by part; the KV cache is what the other parts leave, and may be negative.

    Raises ConfigError for an impossible number among the engine's own options.
    """
    batched = _engine_number(job, "max_num_batched_tokens", _BATCHED_TOKENS)
    working = 2 * job.element * batched * job.shape.largest_block.products / job.tp
    logits = 4 * min(batched, _sequences(job)) * job.shape.vocabulary
    parts = {
        "weights": job.weight_bytes / GIB,
        "activations": (working + logits) / GIB,
        "CUDA graphs": 0.0 if job.config.model.enforce_eager else _GRAPHS_GIB,
        "CUDA context": _CONTEXT_GIB,
    }
    return {**parts, "KV cache": job.config.gpu_memory_utilization * job.gpu.memory - sum(parts.values())}


def _sequences(job: InferenceJob) -> int:
    return _engine_number(job, "max_num_seqs", _SEQUENCES)


def _engine_number(job: InferenceJob, key: str, defaults: tuple[int, int]) -> int:
    is_large = job.gpu.memory >= 70 and not job.gpu.name.startswith("A100")
    if (value := job.config.vllm.get(key)) is None:
        return defaults[is_large]
    if type(value) is not int or value < 1:
        raise ConfigError(f"inference.vllm.{key} = {value!r}: set a whole number above 0")
    return value


def decoding(job: InferenceJob, cache_gib: float) -> tuple[float, float, float]:
    """Return sequences that one copy decodes together, seconds of their step, and tokens/s of all copies."""
    shape, gpu = job.shape, job.gpu
    context = job.prompt_tokens / job.group + job.completion_tokens / 2
    room = max(1.0, cache_gib * GIB / max(1.0, job.cache_bytes(context)))
    batch = max(1.0, min(_sequences(job), job.in_flight / job.copies, room))
    block = shape.largest_block
    idle = (1 - block.active / block.experts) ** batch if block.experts else 0.0
    read = job.weight_bytes * (1 - idle * shape.experts / shape.parameters)
    # Each sequence reads the whole context, a shared prompt too.
    read += batch * job.cache_bytes(job.prompt_tokens + job.completion_tokens / 2)
    products = 2 * shape.active * batch / (job.tp * _MATMUL * gpu.flops)
    seconds = max(read / (_BANDWIDTH * gpu.bandwidth), products)
    seconds += _STEP_SECONDS + 2 * len(shape.blocks) * _REDUCTION_SECONDS * (job.tp > 1)
    # The prompt of a group is computed once, between the steps.
    prompts = 2 * shape.active * job.prompt_tokens / job.group / (job.tp * _MATMUL * gpu.flops)
    per_token = seconds / batch + prompts / max(1.0, job.completion_tokens)
    return batch, seconds, job.copies / per_token
