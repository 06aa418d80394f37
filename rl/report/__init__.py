"""Reports for people: metrics, descriptions of batches, and profiles."""
