"""The inference servers as the orchestrator uses them: pool, versions, concurrency, startup."""
