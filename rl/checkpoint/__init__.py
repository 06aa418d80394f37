"""Sharded checkpoints: writing, committing, finding, retaining and restoring them."""
