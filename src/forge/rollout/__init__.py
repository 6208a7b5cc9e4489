"""Rollouts: from prompts to groups of scored completions, and from groups to batches to learn from."""
