"""Changes of vLLM 0.32.0 for recording the experts of each token, for router replay; see `patches`."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np


def allow_routes_on_cpu() -> None:
    """Accept `enable_return_routed_experts` on a CPU: vLLM implements it only in its second model runner, for GPUs.

    `record_routes` does it for the first one. vLLM leaves the check to platforms outside its tree, so the CPU counts as
    one meanwhile. Must be called before vLLM's configuration is made.
    Without it tests/integration/inference/test_routes.py fails.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    verify = VllmConfig._verify_aux_output_compatibility

    def verify_on_cpu(config: Any) -> None:
        if config.aux_output_config.enabled and config.speculative_config is not None:
            raise ValueError("enable_return_routed_experts is not supported with speculative decoding on a CPU")
        current_platform.is_out_of_tree = lambda: True
        try:
            verify(config)
        finally:
            del current_platform.is_out_of_tree

    VllmConfig._verify_aux_output_compatibility = verify_on_cpu


def record_routes(runner: Any) -> None:
    """Record the experts of each token (`enable_return_routed_experts`), also if a switch preempts requests.

    A switch preempts requests that may continue in the next step. vLLM's worker would get the end and the start of a
    request at once, and fail; here it gets the end first. The pause has waited for all earlier steps. On a CPU this
    also calls vLLM's recorder, as the second model runner does on a GPU.

    Must be called in each worker, after the KV cache is allocated. Without it
    tests/integration/inference/test_routes.py::test_routes_of_requests_that_a_switch_interrupts fails.
    """
    config = runner.vllm_config
    if not config.aux_output_config.enabled:
        return
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector

    begin = AuxOutputWorkerConnector.begin_step

    def begin_step(connector: Any, metadata: Any) -> None:
        if metadata is not None and (again := metadata.requests.keys() & set(metadata.finished_requests)):
            ended = AuxOutputConnectorMetadata(metadata.generation, {}, {}, tuple(again))
            others = tuple(name for name in metadata.finished_requests if name not in again)
            begin(connector, ended)
            metadata = replace(metadata, finished_requests=others)
        begin(connector, metadata)

    AuxOutputWorkerConnector.begin_step = begin_step
    if hasattr(runner, "aux_output_connector"):
        return
    connector = get_aux_output_connector(runner.model, config, runner.kv_cache_config)
    execute, sample, pending = runner.execute_model, runner.sample_tokens, list[Any]()

    def execute_and_record(scheduled: Any, *args: Any, **options: Any) -> Any:
        connector.begin_step(scheduled.aux_output_connector_metadata)
        result = execute(scheduled, *args, **options)
        if scheduled.total_num_scheduled_tokens:
            batch, count = runner.input_batch, runner.input_batch.num_reqs
            step = SimpleNamespace(
                req_ids=batch.req_ids[:count],
                query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            )
            pending.append(connector.prepare_output(step))
        return result

    def sample_and_record(*args: Any, **options: Any) -> Any:
        sampled = ~runner.discard_request_mask.np[: runner.input_batch.num_reqs]  # the others are parts of prompts
        output = sample(*args, **options)
        if pending and (step := pending.pop()) is not None:
            step.enqueue_cpu_copy(sampled.astype(np.int32), np.zeros(len(sampled), np.int32))
            output.aux_output_connector_output = step.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_and_record, sample_and_record
