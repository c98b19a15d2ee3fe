"""Environments that run in a Python interpreter of their own."""
