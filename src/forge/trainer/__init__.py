"""Training: the engine on TorchTitan, its actor, checkpoints and layouts."""
