"""Supervised fine-tuning on the same step engine."""
