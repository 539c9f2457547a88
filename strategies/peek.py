"""Shows Keras the shapes of a dataset without reading from it."""

import tensorflow as tf

from tfdist import _tf


class PeekableDataset(tf.distribute.DistributedDataset):
    """A distributed dataset that `fit` can look into without loss.

    Before the first step Keras takes one batch to learn its shapes, and drops it with the iterator and whatever that
    has prefetched. A generator would lose these batches, another number on each worker. Keras gets the specs instead.
    """

    def __init__(self, dataset: tf.distribute.DistributedDataset):
        self._dataset = dataset

    def __iter__(self):
        if _tf.keras_is_peeking() and all(_has_rank(spec) for spec in tf.nest.flatten(self.element_spec)):
            return iter([tf.nest.map_structure(_of_first_replica, self.element_spec)])
        return iter(self._dataset)

    @property
    def element_spec(self):
        """As of the dataset inside."""
        return self._dataset.element_spec


def _of_first_replica(spec):
    if isinstance(spec, _tf.PerReplicaSpec):
        spec = spec._component_specs[0]
    return spec if hasattr(spec, "shape") else None  # An empty Optional and `None` have none.


def _has_rank(spec):
    spec = _of_first_replica(spec)
    return spec is None or spec.shape.rank is not None
