"""Shared by several environments: reading rows, finding the answer in a reply, grading mathematics."""
