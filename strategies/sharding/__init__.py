"""Sharded models: each replica keeps a part of the optimizer state or of an embedding, and updates this part."""
