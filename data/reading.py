"""From the numbers of examples to a batch of tensors: read, decoded and mapped inside `tf.data`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _tf
from tfdist.data.sources import Source
from tfdist.data.weakly import weakly

_SEEDS = 1 << 31


class Reader:
    """Makes a batch of a vector of numbers; an example that fails is named.

    Args:
      source: What is read.
      map_fn: What to make of an example, as for `tf.data.Dataset.map`, in parallel.

    Raises:
      TypeError: If that is no function.
    """

    def __init__(self, source: Source, map_fn: Callable[..., Any] | None):
        if map_fn is not None and not callable(map_fn):
            raise TypeError(f"map_fn is a function of an example, not {map_fn!r}.")
        self._source, self._map_fn = source, map_fn

    @property
    def makes_anything(self) -> bool:
        """Whether a batch is more than what the source reads."""
        return self._source.decodes or self._map_fn is not None

    def __call__(self, indices: tf.Tensor, examples: Any = None, *, replica: int = 0) -> Any:
        """Reads examples in a `tf.data` graph.

        Args:
          indices: int64 [b], b from 0.
          examples: What the source gives for them, if it was read before.
          replica: The first of this worker's; see `drawing_afresh`.

        Returns:
          What `map_fn` makes of an example, each tensor with a leading dimension b.

        Raises:
          ValueError: If `map_fn` gives what cannot be batched.
          tf.errors.OpError: While the graph runs, with the message of a `SourceError`, if an example cannot be read.
        """
        if not self.makes_anything:
            return self._source.read(indices) if examples is None else examples
        rows = tf.size(indices)
        some = tf.cond(rows > 0, lambda: indices, lambda: tf.zeros([1], tf.int64))  # No dataset of nothing.
        if examples is None:
            examples = self._source.read(some)
        else:
            examples = tf.cond(rows > 0, lambda: examples, lambda: self._source.read(some))
        mapped = self._mapped(examples, replica).ignore_errors()
        _check_specs(mapped.element_spec)
        nothing = tf.data.Dataset.from_tensors(tf.nest.map_structure(_no_rows, mapped.element_spec))
        batched = mapped.batch(tf.size(some, tf.int64)).ignore_errors()  # Shapes may be unlike.
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
                raise self._source.failure(index, f"could not be mapped: {problem}. Mend it, or map_fn.") from error
            shapes = [leaf.shape.as_list() for leaf in tf.nest.flatten(mapped)]
            expected = shapes if expected is None else expected
            if shapes != expected:
                raise self._source.failure(
                    index,
                    f"has other shapes than example {indices[0]} once it is mapped, {_listed(shapes)} and not "
                    f"{_listed(expected)}, and examples are batched. Give all the same shape in map_fn.",
                )
        raise self._source.failure(
            indices[0],
            "or one after it could be mapped, or had the shape of others, at the second try only. Mend map_fn.",
        )


def drawing_afresh(map_fn: Callable[..., Any], replica: int = 0) -> Callable[..., Any]:
    """`map_fn`, whose unseeded random operations draw afresh in each of many graphs that are traced of it.

    Of the seed that all workers have in common they would draw the same in each batch, and on each worker. Where
    operations are deterministic they need a seed: there workers draw apart, but in each batch the same.

    Args:
      map_fn: What is called in a graph of its own.
      replica: Whose draws are to be unlike others' where a seed is needed.
    """

    def draw(*example: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if not _tf.is_op_determinism_enabled():
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
            f"map_fn makes tensors of an example, in tuples and dicts, but it returned {mapped!r}. Return what to "
            "train on, and leave out what is None."
        )


def _listed(shapes: list[list[int]]) -> str:
    return ", ".join(map(str, shapes))


def _check_specs(structure: Any) -> None:
    for spec in tf.nest.flatten(structure):
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise ValueError(
                f"Examples are batched, so map_fn must give dense tensors of known rank and equal shapes, not {spec}. "
                "Use tf.ensure_shape, or to_tensor and padding."
            )


def _no_rows(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)


def _unpacked(example: tuple[Any, ...]) -> Any:
    return example[0] if len(example) == 1 else example
