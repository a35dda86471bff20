"""Predictions of published runs, and how far they are off."""
