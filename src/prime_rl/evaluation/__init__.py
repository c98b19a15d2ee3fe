"""Evaluation of a served model, during a run and apart from one, and the synthesis of training data."""
