"""The world of ranks: start, join, exchange messages, serve, handle signals and errors, restart."""
