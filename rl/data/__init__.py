"""Data without a model: prompt files, the prompt stream, ragged batches and their packing."""
