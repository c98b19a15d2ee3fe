"""Finished groups to a packed batch."""
