"""All changes of vLLM's behaviour, for vLLM 0.32.0, except `route_recorder` and `drafts_on_cpu`.

Each has its reason and the test that fails without it.
"""

import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.logs import share_log_file
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER
from prime_rl.liveness.heartbeat_monitor import ENGINE
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import ENGINE_DIRECTORY, ENGINE_SERVER, request_parent_death_signal
from prime_rl.storage.paths import RunPaths

# Private names of vLLM that this package overrides, replaces or calls. Without the check a renamed one could be missed:
# an override that vLLM no longer calls would leave KV of old weights in the prefix cache.
_HOOKS = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "__init__ schedule add_request finish_requests set_pause_state reset_encoder_cache "
        "_get_local_prefix_cache_hit _preempt_request"
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "schedule",
    "vllm.v1.core.sched.request_queue:RequestQueue": "remove_request prepend_request",
    "vllm.v1.request:Request": "update_block_hashes num_output_tokens num_tokens",
    "vllm.v1.engine.core:EngineCore": (
        "__init__ _initialize_kv_caches set_weight_version get_weight_version collective_rpc"
    ),
    "vllm.v1.engine.core:EngineCoreProc": "run_engine_core _send_abort_outputs",
    "vllm.v1.executor.multiproc_executor:WorkerProc": "__init__ worker_main",
    "vllm.v1.engine.core_client:AsyncMPClient": "call_utility_all_async add_request_async pause_scheduler_async",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient": "call_utility_all_async add_request_async",
    "vllm.v1.engine.async_llm:AsyncLLM": "generate resume_generation pause_generation abort get_supported_tasks",
    "vllm.v1.engine.output_processor:RequestState": "track_weight_version make_request_output _weight_version_spans",
    "vllm.v1.engine.output_processor:OutputProcessor": "process_outputs abort_requests _update_admission_stats",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "from_new_request update output_token_ids num_output_tokens",
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs _validate_model_inputs _validate_prompt_len",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "_sample _bookkeeping_sync",
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": "__call__",
    "vllm.v1.sample.rejection_sampler:_sample_recovered_tokens": "__call__",
    "vllm.v1.sample.rejection_sampler:_rejection_random_sample": "__call__",
    "vllm.v1.engine:EngineCoreRequest": "external_req_id sampling_params cache_salt lora_request",
    "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens": "_preflight _is_model_supported",
    "vllm.config:VllmConfig": "_verify_aux_output_compatibility",
    "vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector": "request_finished",
    "vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector": "begin_step prepare_output process_output",
    "vllm.v1.engine.coordinator:DPCoordinator": "_wait_for_zmq_addrs",
    "vllm.v1.engine.coordinator:DPCoordinatorProc": "run_coordinator",
    "vllm.v1.engine.utils:CoreEngineProcManager": "sentinels shutdown",
}


def check_hooks() -> None:
    """Raise ConfigError if vLLM lacks one of the private names above. Must be called before an engine starts."""
    for place, names in _HOOKS.items():
        module, _, kind = place.partition(":")
        owner = None
        with suppress(ImportError):
            owner = getattr(importlib.import_module(module), kind, None)
        if lacking := [name for name in names.split() if not hasattr(owner, name)]:
            raise ConfigError(
                f"the installed vLLM has no {module}.{kind}.{lacking[0]}, needed for versions; install vLLM 0.32.0"
            )


def start_fast_on_cpu() -> None:
    """Start engines on a CPU in half the time, by forks instead of spawned processes.

    On a CPU vLLM inspects the model's class in a subprocess, then spawns the engine, which spawns a worker; each of
    these processes imports torch and vLLM again. There is no device state that a fork could break, so the class is
    inspected in this process, and the engine and the coordinator of data-parallel engines are forked. The engine runs
    its worker itself (`engine_arguments.forks_engines`).

    Must be called after vLLM is imported and before the engine starts.
    Without it tests/integration/inference/test_server.py::test_engine_is_forked_from_the_server_on_a_cpu fails.
    """
    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.coordinator as coordinator
    import vllm.v1.engine.core  # this and the imports below are for the forked process
    import vllm.v1.engine.utils as engine_utils
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # The CPU platform writes "spawn" into the environment, where get_mp_context reads it.
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    coordinator.get_mp_context = engine_utils.get_mp_context
    model_info = registry._ModelInfo.from_model_cls
    registry._LazyRegisteredModel.inspect_model_cls = lambda model: model_info(model.load_model_cls())


def keep_log_file() -> None:
    """Write vLLM's log to the server's log file as well, in the server, its engines and their workers.

    vLLM replaces the handlers of its logger whenever it configures it. Must be called in each process before that
    process logs; a forked engine inherits it.
    Without it tests/integration/inference/test_server.py::test_log_file_has_the_lines_of_engines fails.
    """
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    if (file := share_log_file()) is not None:
        DEFAULT_LOGGING_CONFIG["handlers"]["server_file"] = {"()": lambda: file}
        DEFAULT_LOGGING_CONFIG["loggers"]["vllm"]["handlers"] = ["vllm", "server_file"]
        logging.getLogger("vllm").addHandler(file)


def report_start_of_engine(rank: int) -> None:
    """Write a heartbeat while this engine, the data-parallel one with this rank, starts, and the phases of the start.

    Its server watches a started engine, so the heartbeat is removed. A server without the run's directory has none.
    Must be called in the process of the engine, before it is built.
    Without it tests/integration/inference/test_server.py::test_engine_reports_the_phases_of_its_start fails.
    """
    from vllm.v1.engine.core import EngineCore

    build, allocate = EngineCore.__init__, EngineCore._initialize_kv_caches
    if (directory := os.environ.get(ENGINE_DIRECTORY)) is None:
        return
    paths, name = RunPaths(Path(directory)), f"{ENGINE}_{os.environ[ENGINE_SERVER]}_{rank}"
    heartbeat = HeartbeatWriter(paths, name, ENGINE)
    heartbeat.enter_imports("vLLM")

    def build_with_phases(engine: Any, *args: Any, **options: Any) -> None:
        with heartbeat:
            heartbeat.enter("load the model")
            build(engine, *args, **options)
        paths.heartbeat(name).unlink(missing_ok=True)

    def allocate_with_phase(engine: Any, *args: Any, **options: Any) -> Any:
        heartbeat.enter("compile and measure the KV cache")
        return allocate(engine, *args, **options)

    EngineCore.__init__, EngineCore._initialize_kv_caches = build_with_phases, allocate_with_phase


def route_in_float32() -> None:
    """Compute the logits of routers in float32 from weights of the model's precision, as the trainer does.

    vLLM rounds the logits of most models to that precision. Trainer and sampler then choose different experts for some
    tokens, and the importance ratios of these tokens are noise. Routers are not quantized either (`vllm.quantization`).

    Must be called in each worker, before the model is built.
    Without it tests/integration/inference/test_half_precision.py::test_experts_are_chosen_in_float32 fails.
    """
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    build, load, complete = GateLinear.__init__, GateLinear.weight_loader, FusedMoEConfig.__post_init__

    def build_in_float32(gate: Any, *args: Any, **options: Any) -> None:
        options |= {"params_dtype": torch.float32, "out_dtype": torch.float32, "quant_config": None}
        build(gate, *args, **options)
        gate.rounded_dtype = torch.get_default_dtype()  # the model's, while it is built

    def load_rounded(gate: Any, parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
        load(gate, parameter, weight.to(gate.rounded_dtype))

    def expect_float32(config: Any) -> None:
        if config.router_logits_dtype is None:  # of the buffers in which data-parallel copies exchange logits
            config.router_logits_dtype = torch.float32
        complete(config)

    GateLinear.__init__, GateLinear.weight_loader = build_in_float32, load_rounded
    FusedMoEConfig.__post_init__ = expect_float32


def compute_hybrid_models_on_cpu() -> None:
    """Correct three computations of vLLM's CPU build that hybrid models need.

    1. Queries by head, [tokens, heads, size], as of LFM2, are rotated wrongly: the kernel takes heads for tokens.
    2. For the prefix cache, layers of Mamba-2 save a state inside of a prompt by a kernel of Triton: the engine
       crashes. Without it prompts are prefilled in parts that end there, as with other recurrent layers.
    3. The kernels of the gated delta rule require bfloat16: the engine crashes. In other precisions it is computed here
       by the functions of transformers, which the trainer uses.

    Must be called in each worker, before the model is built.
    Without it tests/integration/inference/test_hybrid_models.py fails.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import LayerNameType

    if not current_platform.is_cpu():
        return
    rotate, get_spec = RotaryEmbedding.forward_cpu, MambaMixer2.get_kv_cache_spec
    update_in_bf16 = gdn_attention.cpu_gdn_attention_core

    def rotate_flat(layer: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.dim() == 2:
            return rotate(layer, positions, query, key)
        heads = [query] if key is None else [query, key]
        rotated = rotate(layer, positions, *[tensor.flatten(1) for tensor in heads])
        new = [flat.view(tensor.shape) for flat, tensor in zip(rotated, heads, strict=False)]
        return new[0], new[1] if len(new) > 1 else None

    def specify(layer: Any, config: Any) -> Any:
        spec = get_spec(layer, config)
        return spec and replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    def update(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            update_in_bf16(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = gdn_attention.get_forward_context()
        layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
        if context.attn_metadata is not None and context.attn_metadata[layer.prefix].num_actual_tokens:
            _update_delta_states(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    RotaryEmbedding.forward_cpu, MambaMixer2.get_kv_cache_spec = rotate_flat, specify
    gdn_attention.cpu_gdn_attention_core = update


def _update_delta_states(layer: Any, metadata: Any, qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Convolution and gated delta rule of all sequences of a step; updates their cached states."""
    from transformers.models.qwen3_next import modeling_qwen3_next as reference
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    count = metadata.num_decodes + metadata.num_prefills
    slots, bounds = metadata.non_spec_state_indices_tensor[:count], metadata.non_spec_query_start_loc[: count + 1]
    known = metadata.has_initial_state
    known = torch.ones(count, dtype=torch.bool) if known is None else known[:count]
    windows, states = layer.kv_cache[0], layer.kv_cache[1]
    windows = windows if is_conv_state_dim_first() else windows.transpose(-1, -2)
    states = states.view(*states.shape[:2], states.shape[3], states.shape[2])  # the last dimension is the value's
    states[slots[~known]] = 0
    qkv = causal_conv1d_fn_cpu(
        qkv.T, layer.conv1d.weight.flatten(1), layer.conv1d.bias, windows, bounds, slots, known, layer.activation
    ).T
    query, key, value = layer.rearrange_mixed_qkv(qkv)
    query, key = (heads.repeat_interleave(value.shape[2] // heads.shape[2], 2) for heads in (query, key))
    decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias)
    inputs = (query, key, value, decay[None], b.sigmoid()[None])

    def apply(rule: Any, tokens: list[Tensor], chosen: Tensor) -> Tensor:
        options = {"initial_state": states[chosen], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        result, last = rule(*tokens, **options)
        states[chosen] = last.to(states.dtype)
        return result

    single = metadata.num_decodes
    if single:  # a batch of sequences with one token each
        tokens = [tensor[:, :single].transpose(0, 1) for tensor in inputs]
        out[:single] = apply(reference.torch_recurrent_gated_delta_rule, tokens, slots[:single])[:, 0]
    for index, (begin, end) in enumerate(pairwise(bounds[single:].tolist()), single):
        tokens = [tensor[:, begin:end] for tensor in inputs]
        out[begin:end] = apply(reference.torch_chunk_gated_delta_rule, tokens, slots[index : index + 1])[0]


def repack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output head on a CPU again after a reload.

    Linear layers on a CPU multiply by a packed copy of their weight, made after loading. A reload packs each layer of
    the checkpoint again. A tied head is not in the checkpoint, since its weight is the embedding's, and keeps the copy
    of the old weight: vLLM logs "ParallelLMHead: Failed to load weights" and samples with mixed weights.

    Only needed for vLLM's reload; `shadow_weights` packs a tied head with all other layers.
    Without it tests/integration/inference/test_adapters.py::test_full_weights_with_lora_enabled_use_vllms_reload fails.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embedded = {layer.weight.data_ptr() for layer in layers if not isinstance(layer, ParallelLMHead)}
    for module in layers:
        tied = isinstance(module, ParallelLMHead) and module.weight.numel() and module.weight.data_ptr() in embedded
        if tied and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Remove the kernels of experts on a CPU, so that the next weights are packed.

    The first processing builds the kernel and packs the weights for it. Later calls copy the new weights unpacked into
    the packed ones, which is correct only for the kernels of GPUs. Without a kernel the next processing packs again.

    Without it tests/integration/inference/test_architectures.py::test_switch_updates_the_model fails.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def add_switch_utility() -> None:
    """Add methods to the engine that call its scheduler: `switch_policy`, `last_pause` and others.

    `switch_policy` also sets the version that is attached to tokens, because each call waits in a queue and lengthens
    the pause. It returns the version and salt of the adapter. Must be called in the engine process.
    Without it no server starts: all of tests/integration/inference fails.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import RequestStatus

    def tag_steps(core: Any) -> None:
        own, *others = sorted(core.scheduler.versions.items())
        core.set_weight_version(" ".join((own[1], *(f"{number}={version}" for number, version in others))))

    def switch_policy(core: Any, version: str, content_hash: str, recompute: bool, number: int) -> list[str]:
        core.scheduler.versions[number] = version
        tag_steps(core)
        core.scheduler.switch_policy(content_hash, recompute, number)
        return [version_in(core.get_weight_version(), number), core.scheduler.hash_of(number)]

    def forget_adapter(core: Any, number: int) -> None:
        core.scheduler.forget_adapter(number)
        tag_steps(core)

    def end_requests(core: Any, number: int) -> None:
        names = [request.request_id for request in core.scheduler.requests_of(number)]
        core._send_abort_outputs(core.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED))

    EngineCore.switch_policy, EngineCore.forget_adapter, EngineCore.end_requests = (
        switch_policy, forget_adapter, end_requests,
    )  # fmt: skip
    EngineCore.last_pause = lambda core: core.scheduler.last_pause_seconds
    EngineCore.count_requests = lambda core, number: len(core.scheduler.requests_of(number))


@lru_cache(maxsize=4096)
def version_in(tag: str, number: int) -> str:
    """Return the version of an adapter in the tag of a step: `0.3 5=1.2` has 0.3 of the base slot, and 1.2 of 5."""
    own, *others = tag.split(" ")
    return dict(other.split("=") for other in others).get(str(number), own)


def tag_tokens_by_adapter() -> None:
    """Tag each token with the version of its request's adapter.

    An engine reports one tag for all tokens of a step. Must be called in the server's process.
    Without it
    tests/integration/inference/test_adapters.py::test_named_adapters_are_served_together_with_the_policy fails.
    """
    from vllm.v1.engine.output_processor import RequestState

    track = RequestState.track_weight_version

    def track_own(state: Any, tag: str) -> None:
        number = POLICY_ADAPTER if state.lora_request is None else state.lora_request.lora_int_id
        track(state, version_in(tag, number))

    RequestState.track_weight_version = track_own


def score_prompts_by_their_own_adapter(runner: Any) -> None:
    """Allow log-probabilities of a prompt (of a canary) in the same step as sampling requests, with adapters on a CPU.

    The output head finds the adapter of each row in a list of the sampling requests of the step. vLLM passes the rows
    of a prompt without changing that list, and with two sampling requests the engine crashes. Here the list contains
    only the prompt's adapter while the prompt is scored.

    Must be called in each worker, after the model is loaded.
    Without it
    tests/integration/inference/test_adapters.py::test_requests_in_flight_continue_with_the_new_adapter fails.
    """
    if not getattr(runner, "lora_config", None) or runner.device.type != "cpu":
        return
    from vllm.lora.layers import LogitsProcessorWithLoRA

    original = runner._get_prompt_logprobs_dict

    def set_adapters(wrapper: Any, adapters: torch.Tensor) -> None:
        wrapper._sampler_indices[: len(adapters)].copy_(adapters)
        wrapper.indices_len[1] = len(adapters)

    def score_one(name: str, hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        request, index = runner.requests[name], runner.input_batch.req_id_to_index[name]
        left = len(request.prompt_token_ids or ()) - request.num_computed_tokens - 1
        rows = max(0, min(scheduled.get(name, 0), left))
        heads = [module for module in runner.model.modules() if isinstance(module, LogitsProcessorWithLoRA)]
        before = [(head.punica_wrapper, head.punica_wrapper.sampler_indices.clone()) for head in heads]
        try:
            for wrapper, adapters in before:
                set_adapters(wrapper, adapters[index].expand(rows))
            return dict(original(hidden, scheduled))
        finally:
            for wrapper, adapters in before:
                set_adapters(wrapper, adapters)

    def score(hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        wanted, scored = runner.num_prompt_logprobs, dict[str, Any]()
        try:
            for name, count in list(wanted.items()):
                if name in scheduled:
                    runner.num_prompt_logprobs = {name: count}
                    scored |= score_one(name, hidden, scheduled)
                    if name not in runner.num_prompt_logprobs:  # the whole prompt is scored
                        del wanted[name]
        finally:
            runner.num_prompt_logprobs = wanted
        return scored

    runner._get_prompt_logprobs_dict = score


def keep_seeds_of_chunked_prompts(runner: Any) -> None:
    """Allow seeded requests whose prompt is prefilled in chunks, on a CPU.

    vLLM samples a token also after a chunk that is not the last one, discards it, and sets the offset of the request's
    generator back. Generators on a CPU have no offset, and the engine crashes. Here these rows are sampled without
    their generators.

    Must be called in each worker. Without it test_seeded_request_with_a_chunked_prompt_is_repeatable of
    tests/integration/inference/test_generation_stream.py fails.
    """
    if runner.device.type != "cpu":
        return
    sample, keep_books, hidden = runner._sample, runner._bookkeeping_sync, dict[int, Any]()

    def sample_without(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        hidden.update({row: generators.pop(row) for row in discarded if row in generators})
        return sample(*args, **kwargs)

    def keep_books_without(*args: Any, **kwargs: Any) -> Any:
        kept = keep_books(*args, **kwargs)
        runner.input_batch.generators.update(hidden)
        hidden.clear()
        return kept

    runner._sample, runner._bookkeeping_sync = sample_without, keep_books_without


def die_with_parent() -> None:
    """End this process when its parent dies, even by SIGKILL.

    Engines call it (`make_scheduler`): otherwise they wait indefinitely for requests, and keep their memory. Workers
    call it too (`WeightUpdateExtension`): separate worker processes would need ten seconds.
    Without it tests/integration/inference/test_data_parallel.py fails.
    """
    if sys.platform != "linux":
        return
    request_parent_death_signal()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_coordinator_with_server(forked: bool, timeout_seconds: float) -> None:
    """End the coordinator of data-parallel engines with the server, and wait longer for its start.

    The coordinator imports vLLM at its start. vLLM waits 120 s for it, too short if many processes read a slow disk.
    Must be called before the engines start.
    Without it tests/integration/inference/test_data_parallel.py and
    tests/unit/inference/test_patches.py::test_coordinator_that_does_not_start_raises_after_our_timeout fail.
    """
    from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc

    def wait_for_addresses(coordinator: Any, pipe: Any) -> Any:
        with pipe:
            if not multiprocessing.connection.wait([pipe, coordinator.proc.sentinel], timeout=timeout_seconds):
                raise RuntimeError(
                    f"the process {coordinator.proc.name} did not start within {timeout_seconds:.0f} s "
                    "(parallel.wait_timeout_seconds)"
                )
            died = f"the process {coordinator.proc.name} died at its start"
            with translate_error(EOFError, lambda _: RuntimeError(died)):
                return pipe.recv()

    DPCoordinator._wait_for_zmq_addrs = wait_for_addresses

    original = DPCoordinatorProc.run_coordinator

    def run_forked(*args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's handler would take seconds
        die_with_parent()
        original(*args, **kwargs)

    DPCoordinatorProc.run_coordinator = staticmethod(run_forked if forked else run_coordinator)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """Main function of a spawned coordinator, in whose process vLLM is not patched."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    die_with_parent()
    DPCoordinatorProc.run_coordinator(*args, **kwargs)
