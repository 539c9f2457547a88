"""How tensors travel between replicas: all-reduce in buckets, encoded gradients, TCP connections. Knows no Keras."""

from tfdist.strategies.collectives.all_reduce import Collectives

__all__ = ["Collectives"]
