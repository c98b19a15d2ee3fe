"""All changes of vLLM's behaviour, for vLLM 0.32.0. Each has its reason and the test that fails without it."""

import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.logs.log_file import share_log_file
from prime_rl.liveness.parent_process import request_parent_death_signal

# Private names of vLLM that this package overrides, replaces or calls. Without the check a renamed one could be missed:
# an override that vLLM no longer calls would leave KV of old weights in the prefix cache.
_HOOKS = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "__init__ schedule add_request set_pause_state reset_encoder_cache _get_local_prefix_cache_hit _preempt_request"
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "schedule",
    "vllm.v1.core.sched.request_queue:RequestQueue": "remove_request prepend_request",
    "vllm.v1.request:Request": "update_block_hashes num_output_tokens num_tokens",
    "vllm.v1.engine.core:EngineCore": "set_weight_version get_weight_version collective_rpc",
    "vllm.v1.engine.core_client:AsyncMPClient": "call_utility_all_async add_request_async pause_scheduler_async",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient": "call_utility_all_async add_request_async",
    "vllm.v1.engine.async_llm:AsyncLLM": "generate resume_generation pause_generation abort get_supported_tasks",
    "vllm.v1.engine.output_processor:RequestState": "track_weight_version make_request_output _weight_version_spans",
    "vllm.v1.engine.output_processor:OutputProcessor": "process_outputs abort_requests _update_admission_stats",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "from_new_request update output_token_ids num_output_tokens",
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs _validate_model_inputs",
    "vllm.v1.engine:EngineCoreRequest": "external_req_id sampling_params cache_salt lora_request",
    "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens": "_preflight _is_model_supported",
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
    the pause. It returns the version and salt of the engine. Must be called in the engine process.
    Without it no server starts: all of tests/integration/inference fails.
    """
    from vllm.v1.engine.core import EngineCore

    def switch_policy(core: Any, version: str, content_hash: str, recompute: bool) -> list[str]:
        core.set_weight_version(version)
        core.scheduler.switch_policy(content_hash, recompute)
        return [core.get_weight_version(), core.scheduler.content_hash]

    EngineCore.switch_policy = switch_policy
    EngineCore.last_pause = lambda core: core.scheduler.last_pause_s
    EngineCore.name_adapter = lambda core, number, content_hash: core.scheduler.name_adapter(number, content_hash)
    EngineCore.count_requests = lambda core, number: core.scheduler.count_requests(number)


def tag_named_adapters(version_of: Callable[[int], str | None]) -> None:
    """Tag tokens of named adapters with the adapter's own version, by its number (None for the policy's adapter).

    An engine reports one version for all tokens of a step, the policy's. Must be called in the server's process.
    Without it
    tests/integration/inference/test_adapters.py::test_named_adapters_are_served_together_with_the_policy fails.
    """
    from vllm.v1.engine.output_processor import RequestState

    track = RequestState.track_weight_version

    def track_named(state: Any, weight_version: str) -> None:
        own = None if state.lora_request is None else version_of(state.lora_request.lora_int_id)
        track(state, own or weight_version)

    RequestState.track_weight_version = track_named


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


def end_coordinator_with_server(forked: bool, timeout_s: float) -> None:
    """End the coordinator of data-parallel engines with the server, and wait longer for its start.

    The coordinator imports vLLM at its start. vLLM waits 120 s for it, too short if many processes read a slow disk.
    Must be called before the engines start.
    Without it tests/integration/inference/test_data_parallel.py and
    tests/unit/inference/test_patches.py::test_coordinator_that_does_not_start_raises_after_our_timeout fail.
    """
    from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc

    def wait_for_addresses(coordinator: Any, pipe: Any) -> Any:
        with pipe:
            if not multiprocessing.connection.wait([pipe, coordinator.proc.sentinel], timeout=timeout_s):
                raise RuntimeError(
                    f"the process {coordinator.proc.name} did not start within {timeout_s:.0f} s "
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
