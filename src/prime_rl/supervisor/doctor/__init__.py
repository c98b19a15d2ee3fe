"""`doctor`: diagnoses a run from its directory: process states, what each is blocked on, the likely culprit."""
