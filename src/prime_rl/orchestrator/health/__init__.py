"""Warnings and limits for a run that makes no progress (I7)."""
