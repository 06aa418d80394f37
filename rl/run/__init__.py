"""Open a run, build the objects that a rank's roles need, and make a dry run."""
