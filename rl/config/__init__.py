"""The configuration: the schema with every key, loading of files and overrides, and rules across keys."""
