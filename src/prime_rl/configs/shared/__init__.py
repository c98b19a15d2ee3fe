"""Blocks that several commands share."""
