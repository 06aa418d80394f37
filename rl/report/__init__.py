"""Reports for people: metrics, TensorBoard, the console, descriptions of batches, and profiles."""
