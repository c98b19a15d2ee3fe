"""Reinforcement learning: batches of the orchestrator, one policy version a step."""
