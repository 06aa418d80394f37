"""Weight sync: the transfer of a new version to all engines, and the proof that it arrived."""
