"""Deltas: exact, compressed differences between consecutive policy versions (docs/design/deltas.md)."""
