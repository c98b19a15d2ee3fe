"""The inference servers as the orchestrator uses them: pool, servers, published versions."""
