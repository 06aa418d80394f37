"""Roles of ranks: the grammar of the placement section, and the process groups that follow from it."""
