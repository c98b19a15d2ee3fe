"""Imported last by a process that others are forked from: they do not collect garbage among its modules."""

import gc

gc.collect()
gc.freeze()
