"""Sampling: the engine interface, the service on engine ranks, and how actors hand out prompts and collect groups."""
