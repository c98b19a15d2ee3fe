"""What the page shows of a run, read from its directory."""
