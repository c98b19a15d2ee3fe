"""Published weights: canary, retention, and transfer without files."""
