"""Fitting a lens: data, objectives, and what keeps a run alive."""
