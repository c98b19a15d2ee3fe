"""The inference server: vLLM's OpenAI server with routes that switch the policy it samples from."""
