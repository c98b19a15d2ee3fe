"""A trainer on several nodes: they share a run directory, and each notices when it no longer hears another."""
