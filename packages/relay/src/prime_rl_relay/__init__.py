"""Replaces the shared directory by HTTP: a relay serves the files of a run, and copies them from other relays."""
