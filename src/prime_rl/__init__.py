"""prime-rl: asynchronous reinforcement learning of language models with a hard bound on staleness.

Layers, each of which imports only earlier ones: core < storage < liveness < loading < configs < plots < monitors
< rollouts < evaluation < orchestrator | trainer | inference < doctor < supervisor < entrypoints. Orchestrator, trainer
and inference are separate processes: they never import each other and exchange files (storage) and HTTP requests.
"""
