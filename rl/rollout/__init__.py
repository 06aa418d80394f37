"""Sampling: engines, the service that runs them, dispatch of prompts, and collection of finished groups."""
