"""The stream of examples and the order in which they are drawn."""
