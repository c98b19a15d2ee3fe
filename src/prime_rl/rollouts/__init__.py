"""Rollouts: run an environment against a model, record its tokens, and score the result. No torch."""
