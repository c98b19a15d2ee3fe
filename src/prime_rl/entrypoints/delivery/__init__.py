"""What follows a run: its policy as a model to take away, with a model card, and a chat with it."""
