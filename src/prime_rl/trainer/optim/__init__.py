"""Optimizers and the learning rate."""
