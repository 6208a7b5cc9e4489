"""The native engine: the trainer's own model, continuous batching over a paged cache."""
