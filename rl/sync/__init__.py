"""Weight sync: the transfer of a new version to all engines, and the check that it arrived."""
