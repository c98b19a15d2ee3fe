"""Runs over several hosts by ssh."""
