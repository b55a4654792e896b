"""Training and scoring of one model: micro-batches, packing, log-probs, optimiser."""
