"""Evaluation on held-out prompts, and the statistics of its results."""
