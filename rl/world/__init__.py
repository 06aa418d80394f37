"""The life of a world: how ranks start, join, talk, serve, take signals and restart."""
