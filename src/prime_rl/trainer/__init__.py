"""The trainer: packed rows in, policy versions out. FSDP2 over gloo (CPU) or NCCL (CUDA)."""
