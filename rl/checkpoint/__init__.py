"""Sharded checkpoints: write, commit, find, keep and restore them."""
