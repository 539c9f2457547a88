"""Sharded models: each replica keeps a part of the optimizer state, and updates this part of the weights."""
