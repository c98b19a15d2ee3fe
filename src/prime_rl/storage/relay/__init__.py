"""The files of a run by HTTP, in place of a shared directory: what a relay offers, and how it is read."""
