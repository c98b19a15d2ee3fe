"""Environment workers: processes that run and score rollouts, and the pool that manages them."""
