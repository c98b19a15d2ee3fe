"""Data of supervised fine-tuning, and the assignment of rows to ranks."""
