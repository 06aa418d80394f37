"""Tensors of the model: loading, sharding, attention, rotary embeddings and logprobs."""
