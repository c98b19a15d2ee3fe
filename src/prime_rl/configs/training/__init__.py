"""Blocks of the commands that train: `trainer` and `sft`."""
