"""The orchestrator: samples rollouts within the bound, ships batches, switches inference. No torch, no vllm."""
