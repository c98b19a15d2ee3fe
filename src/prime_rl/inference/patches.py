"""Every place where vLLM's behaviour is changed, for vLLM 0.32.0. Each says why and which test fails without it."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

_PR_SET_PDEATHSIG = 1


def start_fast_on_cpu() -> None:
    """Start engines on a CPU in half the time: one process less each, and no second import of torch and vLLM.

    On a CPU vLLM inspects the model's class in a subprocess, then spawns the engine, which spawns a worker; each of
    the three imports everything anew. There is no device state here that a fork could break, so the class is
    inspected in this process and the engine, which runs its worker in itself (see `arguments.forks_engines`), is
    forked from it; so is the coordinator of data-parallel engines.

    To be called after vLLM is imported and before the engine starts.
    Without it tests/integration/inference/test_server.py::test_starts_quickly_on_a_cpu fails.
    """
    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.coordinator as coordinator
    import vllm.v1.engine.core  # the three imports below are for the fork to inherit
    import vllm.v1.engine.utils as engine_utils
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    def inspect_here(model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    # The CPU platform writes "spawn" into the environment, where get_mp_context reads it.
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    coordinator.get_mp_context = engine_utils.get_mp_context
    registry._LazyRegisteredModel.inspect_model_cls = inspect_here


def repack_tied_head(model: torch.nn.Module) -> None:
    """Let a tied output head on a CPU see the weights that were just loaded.

    Linear layers on a CPU multiply by a packed copy of their weight, made after loading. A reload packs again each
    layer that the checkpoint names; a tied head is not named, since its weight is the embedding's, and keeps the copy
    that it made of the old one. vLLM logs "ParallelLMHead: Failed to load weights" and samples from a chimera.

    Only vLLM's own reload needs it (`switch`); `standby` packs a tied head with all other layers.
    Without it tests/integration/inference/test_adapters.py::test_all_weights_are_switched_by_vllms_own_reload fails.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Let experts on a CPU be packed again from the weights that are about to be loaded.

    Their kernel is built, and their weights are packed for it, when they are processed for the first time. Later calls
    only copy the new weights, unpacked, to where packed ones are expected: right for kernels of GPUs, whose addresses
    must stay, and nonsense on a CPU. Without a kernel the next processing is a first one.

    Without it tests/integration/inference/test_experts.py::test_experts_follow_the_switch fails.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def add_switch_utility() -> None:
    """Give the engine calls that reach its scheduler: `switch_policy`, `last_pause` ... vLLM has none for that.

    `switch_policy` also sets the version that is attached to tokens: each call waits in a queue, and this one is part
    of the pause. It answers what the engine samples from now. Adds methods and replaces nothing. To be called in the
    engine process.
    Without it no server starts: all of tests/integration/inference fails.
    """
    from vllm.v1.engine.core import EngineCore

    def switch_policy(core: Any, version: str, content_hash: str, recompute: bool) -> list[str]:
        core.set_weight_version(version)
        core.scheduler.switch_policy(content_hash, recompute)
        return [core.get_weight_version(), core.scheduler.content_hash]

    def last_pause(core: Any) -> float:
        seconds: float = core.scheduler.last_pause_s
        return seconds

    def name_adapter(core: Any, number: int, content_hash: str | None) -> None:
        core.scheduler.name_adapter(number, content_hash)

    def requests_of(core: Any, number: int) -> int:
        count: int = core.scheduler.requests_of(number)
        return count

    EngineCore.switch_policy = switch_policy
    EngineCore.last_pause = last_pause
    EngineCore.name_adapter = name_adapter
    EngineCore.requests_of = requests_of


def tag_named_adapters(version_of: Callable[[int], str | None]) -> None:
    """Tag tokens of named adapters with the adapter's own version.

    An engine reports one version for all tokens of a step: the policy's. To be called in the server's process.
    Without it tests/integration/inference/test_adapters.py::test_named_adapters_are_served_beside_the_policy fails.

    Args:
        version_of: gives the version by the adapter's number; None for the policy's.
    """
    from vllm.v1.engine.output_processor import RequestState

    track = RequestState.track_weight_version

    def track_named(state: Any, weight_version: str) -> None:
        own = None if state.lora_request is None else version_of(state.lora_request.lora_int_id)
        track(state, own or weight_version)

    RequestState.track_weight_version = track_named


def score_prompts_by_their_own_adapter(runner: Any) -> None:
    """Let log-probabilities of a prompt (a canary's) be computed beside requests that sample, with adapters on a CPU.

    The output head finds each row's adapter by a list of whoever samples in this step. vLLM gives it the rows of one
    prompt without changing that list: with two who sample the engine dies. Here it says for the time of each prompt
    that all rows are of that request.

    To be called in each worker, after the model is loaded.
    Without it
    tests/integration/inference/test_adapters.py::test_requests_in_flight_go_on_under_the_new_adapter fails.
    """
    if not getattr(runner, "lora_config", None) or runner.device.type != "cpu":
        return
    from vllm.lora.layers import LogitsProcessorWithLoRA

    original = runner._get_prompt_logprobs_dict

    def tell(wrapper: Any, adapters: torch.Tensor) -> None:
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
                tell(wrapper, adapters[index].expand(rows))
            scored: dict[str, Any] = original(hidden, scheduled)
            return scored
        finally:
            for wrapper, adapters in before:
                tell(wrapper, adapters)

    def score(hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        wanted, scored = runner.num_prompt_logprobs, dict[str, Any]()
        try:
            for name, count in list(wanted.items()):
                if name in scheduled:
                    runner.num_prompt_logprobs = {name: count}
                    scored |= score_one(name, hidden, scheduled)
                    if name not in runner.num_prompt_logprobs:  # all of it is scored
                        del wanted[name]
        finally:
            runner.num_prompt_logprobs = wanted
        return scored

    runner._get_prompt_logprobs_dict = score


def die_with_parent() -> None:
    """End this process when the one that started it dies, even by SIGKILL.

    Engines call it (`make_scheduler`): vLLM's wait for requests of a parent that is gone, for ever, and keep the
    memory. Their workers call it too (`worker`): where they are processes of their own, vLLM's need ten seconds.
    Without it tests/integration/inference/test_server.py::test_engine_dies_with_the_server and test_data_parallel.py
    fail.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_coordinator_with_server(forked: bool) -> None:
    """Let the process that counts the requests of data-parallel engines die with the server, as the engines do.

    To be called before the engines start.
    Without it tests/integration/inference/test_data_parallel.py fails.

    Args:
        forked: the process is forked and not spawned.
    """
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    original = DPCoordinatorProc.run_coordinator

    def run_forked(*args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's handler would unwind for seconds
        die_with_parent()
        original(*args, **kwargs)

    DPCoordinatorProc.run_coordinator = staticmethod(run_forked if forked else run_coordinator)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """What the coordinator's process runs instead where it is spawned; in there vLLM is as it was."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    die_with_parent()
    DPCoordinatorProc.run_coordinator(*args, **kwargs)
