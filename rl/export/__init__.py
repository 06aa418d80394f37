"""Export of checkpoints: gathering shards from nodes, merging them into safetensors, and uploading."""
