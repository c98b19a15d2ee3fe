"""One server on several nodes."""
