"""The configuration models, one file per command or block. They import neither torch nor vllm."""
