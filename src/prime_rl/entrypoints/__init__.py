"""The commands: each module parses its configuration and calls one function."""
