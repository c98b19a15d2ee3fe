"""Figures of a run, as plotly's JSON. Imports neither torch nor plotly."""
