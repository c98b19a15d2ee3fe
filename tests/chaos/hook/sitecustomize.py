"""Imported by every Python process whose PYTHONPATH begins with this folder, before its program."""

import chaos_hook

chaos_hook.install()
