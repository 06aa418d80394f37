"""Data without a model: prompt files, the prompt stream, ragged batches, their packing, and files of groups."""
