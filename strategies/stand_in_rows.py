"""Stand-in rows for replicas without rows. A stand-in is a copy of a real row, since models may fail on other rows.

A short last batch, or a worker that has run out of data, can leave a replica without rows. Many kernels and layers fail
without rows (fused convolutions on CPUs, reshapes to (-1, ...)), so the replica runs on one row. Models may check,
parse or decode their input, so this is a copy of a real row. The `Step` discards the results.

    first batch of an input pipeline ── note_row ──▶ ExampleRow ◀── fetched, only on a replica without rows

With one worker the first replica has a row whenever any replica has one, so its row stands in and none is noted.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.row_count import count_rows, has_any

_flags = itertools.count()

# Takes a row of zeros and the number of rows of the replica; returns a real row, or the zeros if it knows none.
Example = Callable[[list[tf.Tensor], int | tf.Tensor | None], list[tf.Tensor]]
_Kind = tuple[tuple[str, int | None], ...]  # Types and ranks of the tensors of a batch.


_MOST_ROWS = 4  # Pipelines of one model and kind whose rows are kept.


class ExampleRow:
    """One row of an input pipeline, kept once it has been read, to stand in on replicas without rows.

    Attributes:
      kind: Types and ranks of the tensors in a batch of the pipeline.
      tensors: The tensors of the row, as NumPy arrays; `None` before one has been read.
    """

    def __init__(self) -> None:
        self.kind: _Kind = ()
        self.tensors: list[np.ndarray] | None = None

    @classmethod
    def of(cls, batch: Any) -> "ExampleRow":
        """Returns the first row of a batch of eager tensors, as a stand-in row."""
        row, tensors = cls(), _tensors_of(tf.nest.map_structure(_first_row, batch))
        row.kind = _kind_of(tensors)
        row.note(*[tensor.numpy() for tensor in tensors])
        return row

    def fits(self, shapes: list[tf.TensorShape]) -> bool:
        """Returns whether a row was read that agrees with `shapes`, the static shapes beside the axis of rows."""
        pairs = zip(self.tensors or (), shapes, strict=False)
        return self.tensors is not None and all(shape.is_compatible_with(each.shape[1:]) for each, shape in pairs)

    def note(self, *tensors: np.ndarray) -> None:
        """Stores copies of the tensors of the row that stands in."""
        # Copies, since TensorFlow's arrays share the memory of a whole batch, which it uses again.
        self.tensors = [np.array(tensor) for tensor in tensors]


class ExampleRows:
    """Stores stand-in rows by model and by kind of batch (types and ranks of its tensors)."""

    def __init__(self):
        self._of_models: weakref.WeakKeyDictionary[Any, dict[_Kind, list[ExampleRow]]] = weakref.WeakKeyDictionary()

    def put(self, model: Any, row: ExampleRow) -> None:
        """Stores a stand-in row for the model that reads its pipeline, unless the model is unknown (`None`)."""
        if model is not None:
            rows = self._of_models.setdefault(model, {})
            rows[row.kind] = [row, *rows.get(row.kind, [])][:_MOST_ROWS]

    def of(self, model: Any) -> Example:
        """Returns a function that looks up a stand-in row for a model when the graph runs."""
        owner, known = weakref.ref(self), weakref.ref(model)  # TensorFlow may keep the function for ever.

        def give(row: list[tf.Tensor], count: int | tf.Tensor | None) -> list[tf.Tensor]:
            kind, shapes = _kind_of(row), [tensor.shape[1:] for tensor in row]

            def fetch(_: np.ndarray, *zeros: np.ndarray) -> list[np.ndarray]:
                rows, of_model = owner(), known()
                own = {} if rows is None or of_model is None else rows._of_models.get(of_model, {})
                fitting = (each.tensors for each in own.get(kind, []) if each.fits(shapes))
                # Copies, since the step may compute in the memory of what it gets.
                return [tensor.copy() for tensor in next(fitting, None) or zeros]

            # Not stateful: TensorFlow would run it after the whole step of the replica that was traced before. The
            # number of rows is an input, since TensorFlow folds an operation on constants before the first step.
            types = [tensor.dtype for tensor in row]
            return tf.nest.flatten(tf.numpy_function(fetch, [count, *row], types, stateful=False))

        return give


def note_row(batch: Any, row: ExampleRow) -> tf.Tensor:
    """Stores the first row of `batch` in `row` when the graph runs, if it has one and none is stored yet.

    Returns True, once the row is stored.
    """
    rows, own = count_rows(batch), _tensors_of(batch)
    if rows is None or not own:
        return tf.constant(True)
    row.kind, known = _kind_of(own), weakref.ref(row)
    del row  # TensorFlow keeps the function for ever.

    def note(has_rows: np.bool_, *tensors: np.ndarray) -> np.bool_:
        wanted = known()
        if wanted is not None and has_rows and wanted.tensors is None:
            wanted.note(*tensors)
        return np.bool_(True)

    first = _tensors_of(tf.nest.map_structure(_first_row, batch))
    return tf.ensure_shape(tf.numpy_function(note, [has_any(rows), *first], tf.bool), [])


def noting(dataset: tf.data.Dataset, row: ExampleRow) -> tf.data.Dataset:
    """Returns `dataset` with a stage that stores in `row` a stand-in row, of the first batch with rows.

    Costs about 0.1 ms of processor time for each batch.
    """
    is_tuple = type(dataset.element_spec) is tuple
    host = tf.data.experimental.cardinality(dataset).device  # The device that holds datasets.
    with tf.init_scope(), tf.device(host):  # Not a `tf.Variable`, which a strategy would copy.
        flag = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=f"tfdist_example_row_{next(_flags)}")
        tf.raw_ops.AssignVariableOp(resource=flag, value=tf.constant(False))

    def look(*batch: Any) -> Any:
        batch = batch if is_tuple else batch[0]

        def take() -> tf.Operation:
            return tf.raw_ops.AssignVariableOp(resource=flag, value=note_row(batch, row))

        rows = count_rows(batch)
        if rows is None:
            return batch
        is_wanted = tf.logical_and(
            tf.logical_not(tf.raw_ops.ReadVariableOp(resource=flag, dtype=tf.bool)), has_any(rows)
        )
        with tf.control_dependencies([tf.cond(is_wanted, take, tf.no_op)]):
            return tf.nest.map_structure(identity, batch)

    return dataset.map(tf.autograph.experimental.do_not_convert(look))


def at_least_one_row(data: Any, rows: int | tf.Tensor | None, example: Example) -> Any:
    """Returns `data`, a replica's batch, or a batch with the one row that `example` returns if `data` has no rows."""
    has_rows = has_any(rows)
    if has_rows is True:
        return data
    places, leaves = _leaves_with_rows(data)

    def stand_in() -> list[Any]:
        zeros = [_row_of_zeros(leaf) for leaf in leaves]
        given = example(tf.nest.flatten(zeros, expand_composites=True), rows)
        for tensor, zero in zip(given, tf.nest.flatten(zeros, expand_composites=True), strict=True):
            tensor.set_shape([None] * zero.shape.rank)
        return tf.nest.pack_sequence_as(zeros, given, expand_composites=True)

    # One branch for all tensors: each branch takes time in every step.
    filled = tf.cond(has_rows, lambda: leaves, stand_in)
    flat = tf.nest.flatten(data)
    for place, leaf, own in zip(places, leaves, filled, strict=True):
        flat[place] = tf.ensure_shape(own, [None, *leaf.shape[1:]]) if isinstance(leaf, tf.Tensor) else own
    return tf.nest.pack_sequence_as(data, flat)


def row_of(batch: Any, otherwise: Example | None = None) -> Example:
    """Returns a function that returns the first row of `batch`, to stand in on a replica without rows.

    If `batch` has no rows, it returns the row of `otherwise`, or without that function the row of zeros.
    """

    def give(row: list[tf.Tensor], count: int | tf.Tensor | None) -> list[tf.Tensor]:
        tensors = tf.nest.map_structure(_as_tensor, batch)
        first = _tensors_of(tf.nest.map_structure(_first_row, tensors))
        has_rows = has_any(count_rows(tensors))
        if has_rows is True:
            return first
        return tf.cond(has_rows, lambda: first, lambda: otherwise(row, count) if otherwise else row)

    return give


def _as_tensor(leaf: Any) -> Any:
    is_one = leaf is None or isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
    return leaf if is_one else tf.convert_to_tensor(leaf)


def _leaves_with_rows(batch: Any) -> tuple[list[int], list[Any]]:
    """Returns the indices of the leaves of a batch that have rows, and these leaves."""
    leaves = tf.nest.flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if _has_rows(leaf)]
    return places, [leaves[place] for place in places]


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return True
    is_tensor = isinstance(leaf, tf.Tensor | tf.TensorSpec) and leaf.dtype not in (tf.variant, tf.resource)
    return is_tensor and leaf.shape.rank not in (0, None)


def _tensors_of(batch: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(_leaves_with_rows(batch)[1], expand_composites=True)


def _kind_of(tensors: list[tf.Tensor]) -> _Kind:
    return tuple((tensor.dtype.name, tensor.shape.rank) for tensor in tensors)


def identity(leaf: Any) -> Any:
    """Returns `leaf` as the output of an operation, if it is a tensor, so that it can wait for other operations."""
    return tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf


def _first_row(leaf: Any) -> Any:
    if not _has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        size = tf.concat([[1], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, tf.zeros_like(leaf.dense_shape), size)
    return leaf[:1]


def _row_of_zeros(leaf: Any) -> Any:
    """Returns one row of zeros with the shape of a leaf's rows. In a ragged row each length is 1."""
    if isinstance(leaf, tf.RaggedTensor):
        zero = tf.zeros(tf.concat([[1], tf.shape(leaf.flat_values)[1:]], 0), leaf.flat_values.dtype)
        return tf.RaggedTensor.from_nested_row_lengths(zero, [tf.ones([1], leaf.row_splits.dtype)] * leaf.ragged_rank)
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.concat([[1], tf.maximum(leaf.dense_shape[1:], 1)], 0)
        return tf.SparseTensor(tf.zeros([1, leaf.shape.rank], tf.int64), tf.zeros([1], leaf.dtype), shape)
    # On a worker without data left, TensorFlow sets unknown dimensions to 0.
    least = [int(size is None) for size in leaf.shape[1:]]
    like = tf.maximum(tf.shape(leaf)[1:], tf.constant(least, tf.int32))
    zero = tf.zeros(tf.concat([[1], like], 0), leaf.dtype)
    zero.set_shape([1, *leaf.shape[1:]])
    return zero
