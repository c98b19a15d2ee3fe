"""Blocks of the commands that run environments."""
