"""Measuring what a lens does to a model."""
