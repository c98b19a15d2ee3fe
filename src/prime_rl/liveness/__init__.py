"""Heartbeats, their monitor, parent processes and locks: how one process learns that another has ended (I7)."""
