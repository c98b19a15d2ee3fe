"""Memory, speed and cost of a run, computed from its configuration."""
