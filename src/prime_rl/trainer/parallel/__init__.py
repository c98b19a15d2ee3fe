"""Process group, device mesh, FSDP2, and tensor, context and expert parallelism."""
