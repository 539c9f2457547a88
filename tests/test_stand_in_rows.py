"""A replica without rows computes on a stand-in row, which is a real row, for inputs of any type."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.stand_in_rows import ExampleRow, ExampleRows, at_least_one_row, noting, row_of
from tfdist.strategies.step import Step


class Model:
    """Takes the place of a model."""


def batches():
    """Returns a batch without rows, a batch of two rows, and another without rows."""
    numbers = np.arange(2)

    def batch(rows):
        return {
            "text": np.array(["seven", "eight"])[:rows],
            "fixed": numbers[:rows, None] + np.ones([1, 3], "float32"),
            "flag": numbers[:rows] >= 0,
            "small": (numbers[:rows] + 5).astype("uint8"),
            "ragged": tf.ragged.constant([["a", "b"], []], dtype=tf.string, ragged_rank=1)[:rows],
            "sparse": tf.sparse.slice(tf.sparse.from_dense([[0, 3], [4, 0]]), [0, 0], [rows, 2]),
        }

    made = [batch(rows) for rows in (0, 2, 0)]
    dense = tf.data.Dataset.from_tensors(made[0])
    for each in made[1:]:
        dense = dense.concatenate(tf.data.Dataset.from_tensors(each))
    return dense


def run(data, example):
    spec = tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data, expand_composites=False
    )
    loose = tf.nest.map_structure(_of_any_rows, spec)
    function = tf.function(
        lambda batch: at_least_one_row(batch, tf.shape(batch["text"])[0], example), input_signature=[loose]
    )
    return function(data)


def _of_any_rows(spec):
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, None], spec.dtype, 1, tf.int64)
    return tf.SparseTensorSpec([None, 2], spec.dtype) if spec is not None else None


def as_lists(batch):
    def listed(leaf):
        if isinstance(leaf, tf.SparseTensor):
            leaf = tf.sparse.to_dense(leaf)
        return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()

    return {name: listed(leaf) for name, leaf in batch.items() if leaf is not None}


FIRST = {
    "text": [b"seven"],
    "fixed": [[1.0, 1.0, 1.0]],
    "flag": [True],
    "small": [5],
    "ragged": [[b"a", b"b"]],
    "sparse": [[0, 3]],
}
ZEROS = {
    "text": [b""],
    "fixed": [[0.0, 0.0, 0.0]],
    "flag": [False],
    "small": [0],
    "ragged": [[b""]],
    "sparse": [[0, 0]],
}


def test_the_first_row_stands_in_with_any_types():
    rows, model, row = ExampleRows(), Model(), ExampleRow()
    dataset = noting(batches(), row)
    rows.put(model, row)
    assert dataset.element_spec == batches().element_spec

    empty, two, last = iter(dataset)

    assert as_lists(run(last, rows.of(model))) == as_lists(run(empty, rows.of(model))) == FIRST
    assert as_lists(run(two, rows.of(model))) == as_lists(two), "what has rows stays as it is"
    assert as_lists(run(last, rows.of(Model()))) == ZEROS, "rows of another model say nothing"


def test_zeros_stand_in_until_a_row_is_read_also_in_traced_functions():
    rows, model, row = ExampleRows(), Model(), ExampleRow()
    dataset = noting(tf.data.Dataset.from_tensor_slices(np.full([4, 2], 7.0)).batch(2), row)
    rows.put(model, row)
    example = rows.of(model)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
    def filled(batch):
        return at_least_one_row(batch, tf.shape(batch)[0], example)

    nothing = tf.zeros([0, 2], tf.float64)
    assert filled(nothing).numpy().tolist() == [[0.0, 0.0]]
    next(iter(dataset))
    assert filled(nothing).numpy().tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize("element", [(1,), {"x": 1}, 1, (1, 2)])
def test_a_dataset_keeps_its_structure(element):
    dataset = tf.data.Dataset.from_tensors(tf.nest.map_structure(lambda value: tf.fill([2], value), element))
    assert noting(dataset, ExampleRow()).element_spec == dataset.element_spec


def test_a_batch_with_rows_gives_its_own_first_row():
    batch = np.array([[3, 4], [5, 6]]), None
    given = row_of(batch)([tf.zeros([1, 2], tf.int64)], 0)
    assert [tensor.numpy().tolist() for tensor in given] == [[[3, 4]]]
    given = row_of((np.zeros([0, 2], "int64"), None))([tf.ones([1, 2], tf.int64)], 0)
    assert [tensor.numpy().tolist() for tensor in given] == [[[1, 1]]]


def test_a_deleted_model_leaves_no_row():
    rows, model, row = ExampleRows(), Model(), ExampleRow.of(tf.ones([2, 2]))
    rows.put(model, row)
    known, example = weakref.ref(row), rows.of(model)
    del row, model
    gc.collect()
    assert known() is None
    assert example([tf.zeros([1, 2])], tf.constant(0))[0].numpy().tolist() == [[0.0, 0.0]]


def test_a_row_stands_in_only_where_its_static_shape_fits():
    model, rows = Model(), ExampleRows()
    for width in (2, 3):
        rows.put(model, ExampleRow.of(tf.fill([4, width], float(width))))

    def row(width):
        (tensor,) = rows.of(model)([tf.zeros([1, width])], 0)
        return tensor.numpy()

    assert [row(width).tolist() for width in (2, 3, 4)] == [[[2.0] * 2], [[3.0] * 3], [[0.0] * 4]]


def test_a_replica_without_rows_gives_zeros_that_tensorflow_does_not_keep():
    @tf.function(input_signature=[tf.TensorSpec([3, 2]), tf.TensorSpec([], tf.int32)])
    def step(gradient, rows):
        return Step(rows).or_zeros([gradient])[0]

    gradient = tf.constant([[1.0, np.nan], [np.inf, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(step(gradient, 0), np.zeros([3, 2]))
    np.testing.assert_array_equal(step(gradient, 5), gradient)
    branches = step.get_concrete_function().graph.as_graph_def().library.function
    operations = {node.name: node for branch in branches for node in branch.node_def}
    filled = [node for node in operations.values() if node.op == "Fill"]
    assert [operations[node.input[1].split(":")[0]].op for node in filled] == ["Cast"]  # No constant.
