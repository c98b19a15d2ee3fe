"""`rl init`: a small project from a template or from the user's own data."""
