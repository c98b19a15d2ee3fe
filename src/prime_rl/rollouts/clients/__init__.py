"""HTTP clients of models: our inference server (tokens in, tokens out) and OpenAI-compatible servers."""
