"""The policy model: log-probabilities, LoRA, fused kernels and checks of the model."""
