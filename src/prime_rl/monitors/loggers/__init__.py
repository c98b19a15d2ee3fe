"""Metric loggers next to metrics/*.jsonl: W&B, trackio and TensorBoard."""
