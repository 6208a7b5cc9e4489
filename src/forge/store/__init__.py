"""Moves tensors between processes: put, get, reshard, and versions of weights."""
