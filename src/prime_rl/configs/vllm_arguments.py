"""Which arguments of vLLM 0.32 the server accepts (`vllm.*`). Each one is listed here exactly once.

Weight updates depend on how the engine loads, schedules and samples. An argument that changes this without a test could
give wrong results without an error, so it is rejected at the start. An argument in no list is rejected too: a new
release of vLLM may add one. tests/unit/inference/test_vllm_arguments.py compares the lists with vLLM's parser.
"""

import difflib
from collections.abc import Mapping
from typing import Any

# Set by the server; another value would break its guarantees.
FIXED: Mapping[str, Any] = {
    "worker_extension_cls": "prime_rl.inference.worker.worker_weight_update.WeightUpdateExtension",
    "scheduler_cls": "prime_rl.inference.vllm.salted_scheduler.make_scheduler",
    "enable_scale_out": True,
    "logprobs_mode": "processed_logprobs",
    # Sampling parameters are those of the request; a model's defaults (top_k 20 ...) would apply silently.
    "generation_config": "vllm",
    # Logits in float32, as the trainer computes them: half precision would round a logit of 20, and with it the
    # log-probability, by up to 0.06. The trainer and the orchestrator read the model's files, so other changes of its
    # configuration belong there.
    "hf_overrides": {"head_dtype": "float32"},
}

PARALLEL: Mapping[str, str] = {
    "tensor_parallel_size": "parallel.tp",
    "data_parallel_size": "parallel.dp",
    "data_parallel_size_local": "parallel.dp_local",
    "data_parallel_start_rank": "parallel.start_rank",
    "data_parallel_address": "parallel.address",
    "data_parallel_rpc_port": "parallel.rpc_port",
    "headless": "parallel.headless",
}
"""vLLM's names of our keys, which users type on each node of a server over several nodes."""

# Argument -> our key.
ELSEWHERE: Mapping[str, str] = {
    "model": "model.name",
    "model_tag": "model.name",
    "revision": "model.revision",
    "host": "server.host",
    "port": "server.port",
    "api_key": "server.api_key_var",
    **PARALLEL,
    # `rl` passes it to the trainer too, whose longrope frequencies depend on it.
    "max_model_len": "model.max_model_len",
    # `rl` lowers it for a restart on a GPU that the trainer uses.
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "enable_return_routed_experts": "enable_return_routed_experts",
    "log_level": "log.level",
    "logging_config": "log.level",
    "log_config_file": "log.level",
    "aux_output_config": "enable_return_routed_experts",
    "hf_token": "the environment variable HF_TOKEN",
}

_TEXT_ONLY = "the server is for autoregressive language models"

# Why arguments are not supported -> the arguments.
_UNSUPPORTED_BY_REASON = {
    "adapters are checked as they are loaded: POST /load_adapter (docs/inference.md)": "lora_modules default_mm_loras",
    "KV outside the engine is not separated by policy version": (
        "kv_transfer_config kv_offloading_size kv_offloading_backend"
    ),
    "encoder outputs outside the engine are not separated by policy version": "ec_transfer_config",
    "encoder outputs of another cache are not cleared by a switch": "ec_manager_config",
    "restart the server for a new certificate": "enable_ssl_refresh",
    "the server listens on server.host and server.port": "uds",
    "the server's routes are at the root of its address": "root_path",
    "the server uses HTTP": "grpc grpc_port",
    "uvicorn has no such limit": "h11_max_header_count",
    "put its keys into the table [vllm]": "config",
    "start one server per node, and set all addresses in client.base_url": (
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_rank"
    ),
    "it is for another entry point of vLLM": (
        "data_parallel_supervisor_port dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s tokens_only"
    ),
    "engines are processes of their node, not of Ray": "data_parallel_backend ray_workers_use_nsight",
    "the number of copies is fixed": "enable_elastic_ep elastic_ep_max_dp_size",
    "a restarted engine would sample from the base model": "enable_fault_tolerance fault_tolerance_config",
    "one process must know which policy is loaded": "api_server_count",
    "one copy of the model over several nodes; parallel.tp is for the GPUs of one node": (
        "nnodes node_rank master_addr master_port"
    ),
    "not tested with weight updates; use parallel.tp": (
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size"
    ),
    "weight updates need vLLM's own worker": "worker_cls",
    "loaders use the initial places of experts, which the balancer changes": "enable_eplb eplb_config",
    "weights are transferred by weight_broadcast": "weight_transfer_config",
    "set it in the table [vllm.speculative_config]": "spec_method spec_model spec_tokens",
    "a sleeping engine drops the policy's weights": (
        "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator "
        "enable_nccl_comm_suspend"
    ),
    "a switch does not reach weights that move between host and device": (
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params "
        "offload_prefetch_step engram_config"
    ),
    "sampling parameters are those of the request": "override_generation_config",
    "the trainer scores tokens with the model's own distribution": (
        "logits_processors watermark_config enable_trace_replay"
    ),
    _TEXT_ONLY: "pooler_config io_processor_plugin diffusion_config mm_encoder_only",
    "embeddings of a client have no policy version": "enable_prompt_embeds enable_mm_embeds",
    "it gives wrong log-probabilities of the canary's prompt": "kv_sharing_fast_prefill",
    "the prefix cache is separated by policy version in whole blocks": "prefix_match_unit",
    "a full queue must not reject the server's canary": "max_num_queued_reqs max_num_queued_tokens",
    "it conflicts with the canary's priority": "watermark",
    "the trainer and the orchestrator read the model's files; change these": (
        "hf_config_path tokenizer tokenizer_revision"
    ),
    "set the method with vllm.quantization": "quantization_config",
}
UNSUPPORTED = {argument: reason for reason, names in _UNSUPPORTED_BY_REASON.items() for argument in names.split()}

# Environment variable of vLLM -> why it must not be set.
UNSUPPORTED_VARIABLES: Mapping[str, str] = {
    "VLLM_DP_SIZE": "set parallel.dp instead",
    "VLLM_MODEL_REDIRECT_PATH": "the engine would load another model than model.name",
    "VLLM_TEST_FORCE_LOAD_FORMAT": "the base model is read and hashed from safetensors files",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "it overrides the model's choice of experts",
}

# Argument -> the only values that are supported, and why.
RESTRICTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "load_format": (("auto", "safetensors"), "the base model is read and hashed from safetensors files"),
    "config_format": (("auto", "hf"), "the trainer reads the model in Hugging Face's format"),
    "runner": (("auto", "generate"), _TEXT_ONLY),
    "convert": (("auto", "none"), _TEXT_ONLY),
    "scheduling_policy": (("fcfs",), "the canary goes to the head of the queue, which another policy would sort"),
    "distributed_executor_backend": (("mp", "uni"), "workers are processes of their node"),
    "safetensors_load_strategy": ((None, "lazy", "eager", "prefetch"), "weights are plain tensors"),
}

# Method of speculative decoding -> its keys. A verified token has the distribution of the loaded weights, whatever
# proposed it, so drafts need no weights, or may have those of another model that stays the same.
DRAFTS: Mapping[str, str] = {
    "ngram": "prompt_lookup_max prompt_lookup_min",
    "suffix": (
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
        "suffix_decoding_min_token_prob"
    ),
    "draft_model": "model revision max_model_len draft_tensor_parallel_size",
}

_MOST_DRAFT_TOKENS = 128
"""A longer draft ends vLLM's engine (`MAX_SPEC_LEN` of its rejection sampler)."""

# Arguments that are tested with weight updates, or that change only speed and memory.
_FRONTEND = """
aggregate_engine_logging allow_credentials allowed_headers allowed_local_media_path allowed_media_domains
allowed_methods allowed_origins anthropic_disabled_thinking_effort chat_template chat_template_content_format
cohere_format cohere_is_reasoning_model default_chat_template_kwargs disable_access_log_for_endpoints
disable_fastapi_docs disable_log_stats disable_uvicorn_access_log enable_auto_tool_choice enable_flash_late_interaction
enable_force_include_usage enable_log_deltas enable_log_outputs enable_log_requests enable_offline_docs
enable_per_request_metrics enable_prompt_tokens_details enable_request_id_headers enable_server_load_tracking
enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none fail_on_environ_validation fingerprint_mode
fingerprint_value h11_max_incomplete_event_size log_error_stack max_log_len middleware renderer_num_workers
response_role return_tokens_as_token_ids served_model_name shutdown_timeout skip_tokenizer_init sse_keep_alive_interval
ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile tokenizer_mode tool_call_parser tool_parser_plugin
tool_server tool_strict_level trust_request_chat_template trust_request_mm_kwargs uvicorn_log_level
"""
_MODEL = """
allow_deprecated_quantization code_revision dtype enforce_eager max_logprobs
model_class_overrides model_impl quantization return_sampling_mask seed trust_remote_code use_fp64_gumbel
download_dir ignore_patterns model_loader_extra_config pt_load_map_location safetensors_prefetch_block_size
safetensors_prefetch_num_threads use_tqdm_on_load reasoning_config reasoning_parser reasoning_parser_plugin
structured_outputs_config disable_sliding_window
"""
_EXECUTION = """
additional_config all2all_backend async_scheduling attention_backend attention_config block_size compilation_config
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cudagraph_capture_sizes dbo_decode_token_threshold
dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate device_ids
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
disable_nccl_for_dp_synchronization distributed_timeout_seconds dp_sync_interval enable_batch_sharded_sampling
enable_chunked_prefill enable_dbo enable_ep_weight_filter enable_expert_parallel enable_flashinfer_autotune enable_hc_sp
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_prefix_caching
enable_shm_tensor_arena expert_placement_strategy gdn_prefill_backend ir_op_priority kda_decode_backend
kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_events_config
linear_backend long_prefill_token_threshold long_prefill_token_threshold_adaptive mamba_backend mamba_block_size
mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm
max_cudagraph_capture_size max_num_active_seqs max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
max_parallel_loading_workers moe_backend num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes
optimization_level performance_mode prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
profiler_config replayssm_buffer_len scheduler_reserve_full_isl sparse_indexer_topk_backend speculative_config
stream_interval swa_bounded_replay ubatch_size use_replayssm
"""
_MULTIMODAL_AND_LORA = """
interleave_mm_strings language_model_only limit_mm_per_prompt media_io_kwargs mm_device_do_normalize
mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
skip_mm_profiling video_pruning_method video_pruning_rate enable_mixed_moe_lora_format enable_moe_shared_loras
enable_tower_connector_lora fully_sharded_loras lora_dtype lora_target_modules max_cpu_loras max_lora_cls_labels
specialize_active_lora
"""
_OBSERVABILITY = """
collect_detailed_traces cudagraph_metrics custom_histogram_buckets enable_layerwise_nvtx_tracing
enable_logging_iteration_details enable_mfu_metrics jit_monitor_mode jit_monitor_verbose kv_cache_metrics
kv_cache_metrics_sample otlp_traces_endpoint per_request_spec_decode_metrics show_hidden_metrics_for_version
"""
ALLOWED = frozenset(" ".join((_FRONTEND, _MODEL, _EXECUTION, _MULTIMODAL_AND_LORA, _OBSERVABILITY)).split())


def refusal_reason(argument: str, value: Any) -> str | None:
    """Return why the server rejects a value of a vLLM argument (with underscores); None if it accepts it."""
    if argument in FIXED:
        return f"is set by the server ({FIXED[argument]}) and cannot be changed; remove it"
    if argument in ELSEWHERE:
        return f"set {ELSEWHERE[argument]} instead"
    if argument in UNSUPPORTED:
        return f"not supported: {UNSUPPORTED[argument]}"
    if argument == "speculative_config":
        return _refuse_drafts(value)
    values, reason = RESTRICTED.get(argument, ((value,), ""))
    if value not in values:
        return f"{value} is not supported ({reason}); supported: {', '.join(map(str, values))}"
    if argument in ALLOWED or argument in RESTRICTED:
        return None
    similar = difflib.get_close_matches(argument.removeprefix("no_"), [*ALLOWED, *RESTRICTED, *ELSEWHERE], 1)
    hint = f"; did you mean {ELSEWHERE.get(similar[0], f'vllm.{similar[0]}')}?" if similar else "; remove it"
    return f"is no argument of vLLM's server that is tested with weight updates{hint}"


def _refuse_drafts(value: Any) -> str | None:
    """Return why drafts are not supported: by another method, or with a key that may change what is sampled."""
    if not isinstance(value, dict):
        return 'is a table, for example { method = "ngram", num_speculative_tokens = 4, prompt_lookup_max = 4 }'
    method = value.get("method")
    if not isinstance(method, str) or method not in DRAFTS:
        return f"method = {method!r} is not supported; supported: {', '.join(DRAFTS)}"
    keys = ["method", "num_speculative_tokens", *DRAFTS[method].split()]
    if others := sorted(value.keys() - {*keys}):
        return f"{others[0]} is not supported with method = {method!r}; supported: {', '.join(keys)}"
    number = value.get("num_speculative_tokens", value.get("suffix_decoding_max_tree_depth", 1))  # vLLM's default
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _MOST_DRAFT_TOKENS:
        return f"num_speculative_tokens = {number!r} must be a whole number from 1 to {_MOST_DRAFT_TOKENS}"
    needed = {"ngram": ["num_speculative_tokens"], "draft_model": ["num_speculative_tokens", "model"]}.get(method, [])
    return next((f"{key} is missing" for key in needed if key not in value), None)
