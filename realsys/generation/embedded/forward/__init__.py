"""One forward pass of the embedded engine: weights, KV cache, model, sampling, and the rows of a step as tensors."""
