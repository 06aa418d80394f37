"""Roles of ranks: parse the placement section, and make the process groups."""
