"""Losses of one packed row."""
