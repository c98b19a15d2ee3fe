"""Rewards to advantages."""
