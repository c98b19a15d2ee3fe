"""prime-rl: asynchronous reinforcement learning of language models with a hard bound on staleness."""
