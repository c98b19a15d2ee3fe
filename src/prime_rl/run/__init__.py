"""The run directory: paths, atomic artifacts, wake-ups, batches. Shared by all processes; no torch."""
