"""What `rl` shows of the run on the console."""
