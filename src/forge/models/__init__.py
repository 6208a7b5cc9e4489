"""Model files: where they come from, and what they mean to the trainer and the generator."""
