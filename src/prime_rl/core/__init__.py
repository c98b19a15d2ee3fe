"""Types, errors, logging and small helpers that all processes use. Imports no other package of the project."""
