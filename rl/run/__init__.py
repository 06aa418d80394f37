"""Assembly of a rank: opening a run, building what its roles need, and the dry run."""
