"""Private names of TensorFlow's datasets (`tf.data`) and of datasets that a strategy distributes.

Comments state why a name is needed and what breaks without it.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._compat import call_stack

# The module of Keras' `fit`, to know when it reads the batch of one step; see `_is_read_for_one_step`.
from keras.src.backend.tensorflow import trainer as keras_trainer

# Values of replicas, and the description of a dataset's elements on each replica; see `_OfSpec`. Without them: `fit`
# reads a batch to learn the shapes.
from tensorflow.python.distribute.values import PerReplica, PerReplicaSpec

# Classes of distributed datasets and of their iterators; see `CountingIterator`. Keras accepts no other foreign
# dataset class. Without them: `fit` refuses a BalancedSharding, and a `fit` on a dataset that the user distributed
# under AutoShardPolicy.OFF ends early.
from tensorflow.python.distribute.input_lib import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedIterator,
    DistributedIteratorSpec,
)

# The source of batches for the replicas of a worker; see `make_iterators_on_devices_anew`. Without it: the end of an
# epoch may wait for TensorFlow's autotuner.
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

# Base class of datasets with the same element structure as their input; see `CountedDataset`.
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

# A dataset that maps elements; see `map_in_place`. Without it: comparing the rows of workers takes longer.
from tensorflow.python.data.ops.map_op import _MapDataset

# Places an iterator on a device; see `make_iterators_on_devices_anew`.
from tensorflow.python.eager import context

__all__ = [
    "CountedDataset",
    "CountingIterator",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "NotedIterator",
    "datasets_of_worker",
    "datasets_read_by",
    "end_together",
    "end_when_all_have_ended",
    "graphs_of_dataset_functions",
    "inputs_of",
    "make_iterators_on_devices_anew",
    "map_in_place",
    "maps_elements",
    "set_cardinality",
    "set_datasets_of_worker",
    "set_mmap_threshold_now",
    "spec_on_a_replica",
]


def end_when_all_have_ended(dataset: Any) -> None:
    """Makes a distributed dataset end when no worker has data left.

    TensorFlow treats the cardinality of `shard(SHARD_HINT, SHARD_HINT)` as infinite, so it does not check for the end.
    Without it: a worker with more data waits for its peers forever.
    """
    dataset._enable_get_next_as_optional = True


def make_iterators_on_devices_anew(iterator: Any, change: Callable[[Any], Any]) -> None:
    """Replaces the iterators on the devices of an unread distributed iterator, to set options there too.

    For each device TensorFlow creates a dataset that reads from the host's dataset, but without the host's options.

    Args:
      iterator: An eager iterator of a distributed dataset.
      change: Function that converts the dataset of a device.
    """
    for of_worker in iterator._iterators:
        shared = of_worker._iterator
        if isinstance(shared, OwnedMultiDeviceIterator):
            for place, device in enumerate(shared._devices):
                with context.device(device):
                    shared._device_iterators[place] = iter(change(shared._device_iterators[place]._dataset))


def end_together(dataset: DistributedDatasetsFromFunction) -> DistributedDatasetsFromFunction:
    """Lets workers read a distributed dataset that ends in the same step on all workers without an exchange per step.

    By default its iterators sum up, before each step, the number of workers that have data left. They still do so in
    `get_next_as_optional`, for several steps in one call or loops in a graph. Without it: that exchange comes back.
    """
    dataset._enable_get_next_as_optional = False
    return dataset


def _counted(name: str) -> Callable[..., "CountedDataset"]:
    def method(self: "CountedDataset", *args: Any, **options: Any) -> "CountedDataset":
        return CountedDataset(getattr(tf.data.Dataset, name)(self, *args, **options), self._batches)

    return method


class CountedDataset(UnaryUnchangedStructureDataset):
    """A dataset with a declared number of elements, which `map` and similar methods keep.

    TensorFlow's `assert_cardinality` would raise for fewer elements. Without it: when Keras maps a dataset for
    `class_weight`, Keras loses the length of an epoch and takes a step too many.

    Args:
      dataset: A dataset of unknown cardinality.
      batches: Largest number of elements of the dataset.
    """

    def __init__(self, dataset: tf.data.Dataset, batches: int):
        super().__init__(dataset, dataset._variant_tensor)
        self._batches = batches

    def cardinality(self) -> tf.Tensor:
        """Returns the declared number of elements of the dataset."""
        return tf.constant(self._batches, tf.int64)

    map, prefetch, with_options = _counted("map"), _counted("prefetch"), _counted("with_options")
    cache, enumerate, scan, shuffle = _counted("cache"), _counted("enumerate"), _counted("scan"), _counted("shuffle")


def map_in_place(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Maps a dataset by a function that runs in the thread that asks for the element, as no public method does.

    Without it: each element passes to a thread of a pool and back. That takes longer than a short function, and the
    element waits while training steps use all cores. The function must hold no lowered control flow, such as `tf.cond`;
    use `tf.raw_ops.While`, which stays in that thread.
    """
    return _MapDataset(dataset, function, use_inter_op_parallelism=False)


class _ReplacingIterator(DistributedIterator):
    """A distributed iterator that takes the place of another one and reads what that would read."""

    def __init__(self, iterator: DistributedIterator):
        super().__init__(
            iterator._input_workers,
            strategy=iterator._strategy,
            components=iterator._iterators,
            element_spec=iterator._element_spec,
            cardinality=iterator._cardinality,
            enable_get_next_as_optional=iterator._enable_get_next_as_optional,
            options=iterator._options,
            replica_order=iterator._replica_order,
        )


class CountingIterator(_ReplacingIterator):
    """A distributed iterator that reports each batch read. Without it: a look at the data counts as a whole epoch.

    Args:
      iterator: The iterator to replace.
      on_batch: Called after each batch that Python code has read.
      on_graph: Called when a graph receives the iterator. The batches that a graph reads are not reported.
    """

    def __init__(self, iterator: DistributedIterator, on_batch: Callable[[], None], on_graph: Callable[[], None]):
        self._on_batch, self._on_graph = on_batch, on_graph
        super().__init__(iterator)

    def get_next(self, name: str | None = None) -> Any:
        """Returns the next batches, one for each replica, and reports that they were read."""
        if not context.executing_eagerly():
            self._on_graph()
            return super().get_next(name)
        with self._strategy.reports.reading():
            batch = super().get_next(name)
        self._on_batch()
        return batch

    def get_next_as_optional(self) -> Any:
        """Returns the next batches as an Optional. Reports the batch, or that a graph reads from now on."""
        if _is_read_for_one_step():
            return _OneBatch(self.get_next(), self.element_spec)
        self._on_graph()
        return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:
        self._on_graph()  # Requested only if the iterator is in an argument of a function.
        return super()._type_spec


def _is_read_for_one_step() -> bool:
    """Returns whether the module of Keras' `fit` called the caller, a method of an iterator, and runs single steps.

    Without it: from Keras 3.16 on, each step of a `fit` on a BalancedSharding has one exchange more.
    """
    return getattr(call_stack.owner_of_caller(keras_trainer), "steps_per_execution", None) == 1


class _OneBatch:
    """Stands for a `tf.experimental.Optional` of a batch that was read. At the end of the data reading raises instead.

    Args:
      batch: The batch, one part for each replica.
      spec: Element spec of the iterator.
    """

    def __init__(self, batch: Any, spec: Any):
        self._batch = batch
        if tf.executing_eagerly():
            self._batch = tf.nest.map_structure(_of_spec, batch, spec)

    def has_value(self) -> bool:
        """Returns True: there is a batch."""
        return True

    def get_value(self) -> Any:
        """Returns the batch."""
        return self._batch


class _OfSpec(PerReplica):
    """Values of replicas with the spec of their iterator, which leaves the number of rows open.

    Without it: a `tf.function` is traced again for each number of rows. Workers with unequal numbers trace at different
    times, and wait for different collectives.
    """

    def __init__(self, values: Any, spec: PerReplicaSpec):
        super().__init__(values)
        self._spec = spec

    @property
    def _type_spec(self) -> PerReplicaSpec:
        return self._spec


def _of_spec(value, spec):
    fits = isinstance(value, PerReplica) and isinstance(spec, PerReplicaSpec) and spec.is_compatible_with(value)
    return _OfSpec(value.values, spec) if fits else value


class NotedIterator(_ReplacingIterator):
    """A distributed iterator that tells its strategy when a batch is requested, in Python or in a graph.

    Without it: a worker that waits for its input looks like a worker that traces its step.

    Args:
      iterator: The iterator to replace.
    """

    def get_next(self, name: str | None = None) -> Any:
        """Returns the next batches, one for each replica; tells the strategy that this worker waits for input."""
        with self._strategy.reports.reading():
            return super().get_next(name)

    def get_next_as_optional(self) -> Any:
        """Returns the next batches as an Optional; tells the strategy that this worker waits for input.

        From Keras 3.16 on, `fit` asks for each batch in this way. TensorFlow would exchange, before each step, whether
        any worker has data left, also if all end in the same step. `get_next` exchanges this only if they may not.
        """
        if _is_read_for_one_step():
            return _OneBatch(self.get_next(), self.element_spec)
        with self._strategy.reports.reading():
            return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:
        return _NotedIteratorSpec(
            *(self._input_workers, self._element_spec, self._strategy, self._options, self._cardinality),
            *(self._enable_get_next_as_optional, self._replica_order),
        )


class _NotedIteratorSpec(DistributedIteratorSpec):
    """The spec that creates a `NotedIterator` in a graph."""

    @property
    def value_type(self) -> Any:
        return NotedIterator

    def _from_components(self, components: Any) -> Any:
        return NotedIterator(super()._from_components(components))


def spec_on_a_replica(spec: Any) -> Any:
    """Converts the spec of a distributed dataset to the spec on the first replica.

    Without it: `fit` on several devices reads a batch to learn its shapes.
    """
    return spec._component_specs[0] if isinstance(spec, PerReplicaSpec) else spec


def datasets_of_worker(distributed: Any) -> list[Any]:
    """Returns the datasets that a distributed dataset reads on this worker.

    Without it: in a `fit` on a dataset that the user distributed, a replica without rows computes on zeros.
    """
    return list(getattr(distributed, _place_of_datasets(distributed)))


def set_datasets_of_worker(distributed: Any, datasets: list[Any]) -> None:
    """Replaces the datasets that a distributed dataset reads on this worker, by `datasets` with equal specs."""
    setattr(distributed, _place_of_datasets(distributed), datasets)


def _place_of_datasets(distributed):
    return "_cloned_datasets" if isinstance(distributed, DistributedDataset) else "_datasets"


def inputs_of(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the datasets that a dataset reads directly, to follow data back to its source."""
    return list(dataset._inputs())


def datasets_read_by(dataset: Any) -> list[Any]:
    """Returns a dataset and its direct and indirect inputs, except datasets that only its functions use.

    Without it: workers that each read a whole sharding train on the same rows without any error.
    """
    found, waiting = {}, [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += inputs_of(each) if isinstance(each, tf.data.Dataset) else []
    return list(found.values())


def graphs_of_dataset_functions(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the graphs of the functions that one stage of a dataset calls.

    Without it: workers cannot tell whether rows differ because of random operations or because of other data.
    """
    return [wrapper.function.graph for wrapper in dataset._functions()]


def maps_elements(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset stage maps each element to one element, to follow a tensor back to its source."""
    return type(dataset).__name__ in ("_MapDataset", "_ParallelMapDataset")


def set_cardinality(dataset, batches: int) -> None:
    """Corrects the number of batches of a distributed dataset, which is also the number of steps of Keras' `fit`.

    A dataset made from a function knows only the batches of its own worker. Without it: a worker with fewer batches
    leaves `fit` before its peers.
    """
    dataset._cardinality = batches


@functools.cache
def set_mmap_threshold_now() -> None:
    """Makes TensorFlow set glibc's `M_MMAP_THRESHOLD` now, so that it does not set it later.

    With Python 3.11, TensorFlow 2.21 sets it to 128 KiB once, when a process first reads a dataset that calls Python,
    as all distributed datasets do. Without this call: the threshold of `keep_freed_memory` is lost before the first
    step, so glibc maps each large tensor anew for which it finds no free memory.
    """
    with tf.init_scope():
        list(tf.data.Dataset.from_generator(tuple, output_signature=tf.TensorSpec([])))
