"""The ledger: which stream positions were started, finished, dropped and shipped (I3)."""
