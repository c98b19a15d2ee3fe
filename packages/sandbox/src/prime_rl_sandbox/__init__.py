"""Runs model-written code in isolated processes within milliseconds. `Sandbox` in `sandbox.py` is the entry point."""
