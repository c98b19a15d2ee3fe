"""What runs inside vLLM's workers: receive weights, check them, put them in place."""
