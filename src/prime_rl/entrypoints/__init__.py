"""The commands: each parses its configuration and calls one function."""
