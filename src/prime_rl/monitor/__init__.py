"""What a process tells about itself while it runs. No torch, no vllm."""

from prime_rl.monitor.monitor import Monitor

__all__ = ["Monitor"]
