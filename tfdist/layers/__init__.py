"""Layers that need a strategy of tfdist to be large."""

from tfdist.layers.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]
