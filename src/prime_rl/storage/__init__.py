"""The run directory: paths, atomic artifacts, batches, checkpoints, weights, waiting for files. Uses no torch."""
