"""Processes of benchmarks/pipeline.py: server and trainer without a model, and the orchestrator."""
