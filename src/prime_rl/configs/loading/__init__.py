"""The configuration mechanism: sources are merged, with the origin of every value, before models are constructed."""
