"""Makes batches of tensors from indices of examples inside `tf.data`: reads, decodes and maps the examples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.data.sources import Source
from tfdist.data.weak_callbacks import weakly

_SEEDS = 1 << 31


class Reader:
    """Makes a batch of tensors from a vector of example indices. Errors name the example that failed.

    Applies `map_fn` to each example, in parallel, as `tf.data.Dataset.map` does.

    Raises:
      TypeError: If `map_fn` is not a function.
    """

    def __init__(self, source: Source, map_fn: Callable[..., Any] | None):
        if map_fn is not None and not callable(map_fn):
            raise TypeError(f"map_fn must be a function of an example, got {map_fn!r}.")
        self._source, self._map_fn = source, map_fn

    @property
    def makes_anything(self) -> bool:
        """Whether examples are decoded or mapped after they are read, or are batches as they are."""
        return self._source.decodes or self._map_fn is not None

    def together(self, groups: tf.data.Dataset) -> tf.data.Dataset:
        """Reads all examples of each group of batches of `coalesced` in one call, and appends them to the group."""
        return groups.map(
            lambda indices, lengths, ends: (indices, lengths, ends, self._source.read(indices)),
            num_parallel_calls=1,
            deterministic=True,
        )

    def batches(self, groups: tf.data.Dataset, num_parallel_calls: int, *, replica: int) -> tf.data.Dataset:
        """Splits groups of batches of `coalesced` into single batches, and reads and decodes the examples of each.

        Returns a dataset of pairs: a batch, and the number of the epoch that begins after it, 0 if none does. `replica`
        is the number of this worker's first replica, see `drawing_afresh`.
        """

        def read(indices: tf.Tensor, length: tf.Tensor, end: tf.Tensor, *examples: tf.Tensor) -> Any:
            return self(indices[:length], *[each[:length] for each in examples], replica=replica), end

        return groups.unbatch().map(read, num_parallel_calls=num_parallel_calls, deterministic=True)

    def __call__(self, indices: tf.Tensor, examples: Any = None, *, replica: int = 0) -> Any:
        """Reads the examples of one batch in a `tf.data` graph.

        `indices` are int64 [b], where b may be 0. `examples` were read before, if given. For `replica` see
        `drawing_afresh`. Returns the structure that `map_fn` returns, with a leading dimension b in each tensor.

        Raises:
          ValueError: If the results of `map_fn` cannot be batched.
          tf.errors.OpError: While the graph runs, with the message of a `SourceError`, if an example cannot be read.
        """
        if not self.makes_anything:
            return self._source.read(indices) if examples is None else examples
        rows = tf.size(indices)
        some = tf.cond(rows > 0, lambda: indices, lambda: tf.zeros([1], tf.int64))  # A dataset needs an example.
        if examples is None:
            examples = self._source.read(some)
        else:
            examples = tf.cond(rows > 0, lambda: examples, lambda: self._source.read(some))
        mapped = self._mapped(examples, replica).ignore_errors()
        _check_specs(mapped.element_spec)
        nothing = tf.data.Dataset.from_tensors(tf.nest.map_structure(_no_rows, mapped.element_spec))
        batched = mapped.batch(tf.size(some, tf.int64)).ignore_errors()  # Shapes may differ.
        batch = batched.concatenate(nothing).take(1).get_single_element()
        first = tf.nest.flatten(batch, expand_composites=True)[0]
        with tf.control_dependencies([tf.cond(tf.shape(first)[0] < tf.size(some), lambda: self._fail(some), tf.no_op)]):
            return tf.nest.map_structure(lambda leaf: tf.identity(leaf)[:rows], batch)

    def _mapped(self, examples: Any, replica: int = 0) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        if self._source.decodes:
            dataset = dataset.map(lambda *example: self._source.decode(_unpacked(example)), tf.data.AUTOTUNE)
        if self._map_fn is None:
            return dataset
        return dataset.map(drawing_afresh(self._map_fn, replica), tf.data.AUTOTUNE)

    def _fail(self, indices: tf.Tensor) -> tf.Operation:
        explained = tf.numpy_function(weakly(self._explain), [indices], [])
        with tf.control_dependencies(tf.nest.flatten([explained])):
            return tf.no_op()

    def _explain(self, indices: np.ndarray) -> None:
        expected: list[list[int]] | None = None
        for index in indices.tolist():
            try:
                (mapped,) = self._mapped(self._source.read(tf.constant([index], tf.int64)))
            except Exception as error:
                problem = str(getattr(error, "message", error)).partition("\n")[0].rpartition("}} ")[2]
                raise self._source.failure(index, f"could not be mapped: {problem}. Correct it or map_fn.") from error
            shapes = [leaf.shape.as_list() for leaf in tf.nest.flatten(mapped)]
            expected = shapes if expected is None else expected
            if shapes != expected:
                raise self._source.failure(
                    index,
                    f"has other shapes than example {indices[0]} after map_fn, {_listed(shapes)} and not "
                    f"{_listed(expected)}, so they cannot be batched. Return equal shapes from map_fn.",
                )
        raise self._source.failure(
            indices[0],
            "or a later one failed in map_fn, or got another shape, but only once. Make map_fn deterministic.",
        )


def drawing_afresh(map_fn: Callable[..., Any], replica: int = 0) -> Callable[..., Any]:
    """Wraps `map_fn` so that its unseeded random operations draw new numbers in each graph that traces it.

    With the global seed, which all workers share, they would draw the same numbers in each batch and on each worker.
    With op determinism, which requires a seed, workers draw different numbers, but each batch of a worker the same. The
    seed then varies with `replica`, the number of this worker's first replica.
    """

    def draw(*example: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if not tf_internals.is_op_determinism_enabled():
            graph.seed = None
        elif graph.seed is not None:
            graph.seed = (graph.seed + replica) % _SEEDS
        mapped = map_fn(*example)
        _check_whole(mapped)
        return mapped

    return draw


def _check_whole(mapped: Any) -> None:
    leaves = tf.nest.flatten(mapped)
    if not leaves or any(leaf is None for leaf in leaves):
        raise ValueError(
            f"map_fn must return tensors, possibly in tuples and dicts, but it returned {mapped!r}. Return at least "
            "one tensor, and leave out values that are None."
        )


def _listed(shapes: list[list[int]]) -> str:
    return ", ".join(map(str, shapes))


def _check_specs(structure: Any) -> None:
    for spec in tf.nest.flatten(structure):
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise ValueError(
                "map_fn must return dense tensors of known rank and equal shapes, so that examples can be batched, got "
                f"{spec}. Use tf.ensure_shape, or to_tensor and padding."
            )


def _no_rows(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)


def _unpacked(example: tuple[Any, ...]) -> Any:
    return example[0] if len(example) == 1 else example
