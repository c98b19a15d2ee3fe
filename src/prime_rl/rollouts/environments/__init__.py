"""Environments: how an id is resolved and loaded, and what identifies one."""
