"""The log of a process: its format, and its file in the run directory."""
