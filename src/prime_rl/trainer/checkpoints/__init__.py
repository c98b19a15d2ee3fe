"""Saving and resuming a trainer (docs/fault_tolerance.md)."""
