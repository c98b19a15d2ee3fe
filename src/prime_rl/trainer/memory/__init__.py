"""Recomputation, compilation, offloading and garbage collection; results do not change."""
