"""How tensors travel between replicas: launchers, buckets, sparse exchange. A collective knows no Keras."""

from tfdist.strategies.collectives.all_reduce import Collectives

__all__ = ["Collectives"]
