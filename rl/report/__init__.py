"""What a run tells people: metrics, descriptions of batches, and profiles."""
