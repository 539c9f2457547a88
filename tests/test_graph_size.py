"""The graph of a step hardly grows with the number of workers. No graph runs here, so no worker starts."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.collectives.encoded_reducer import EncodedReducer
from tfdist.strategies.compression import from_name
from unconnected_exchange import unconnected_collectives

# A network with three dense layers: the large weights are encoded, the rest travels raw.
SHAPES = ([256, 640], [640], [640, 640], [640], [640, 10], [10])
ENCODED = (0, 2)


@functools.cache
def nodes(codec, workers):
    """Returns the number of operations of a step on workers with one CPU each, with those of its functions."""
    collectives = unconnected_collectives(workers)
    codecs = [codec and from_name(codec) if i in ENCODED else None for i in range(len(SHAPES))]
    reducer = EncodedReducer([tf.zeros(shape) for shape in SHAPES], codecs, collectives, seed=0)
    assert reducer.encodes == (codec is not None)

    @tf.function(autograph=False)
    def step(rows, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            for matrix, bias in zip(weights[::2], weights[1::2], strict=True):
                rows = tf.nn.relu(rows @ matrix + bias)
            loss = tf.reduce_sum(rows)
        sums = reducer(0, tape.gradient(loss, weights), np.int64(0))
        return [weight - 0.1 * total for weight, total in zip(weights, sums, strict=True)]

    rows = tf.TensorSpec([None, SHAPES[0][0]])
    graph = step.get_concrete_function(rows, *map(tf.TensorSpec, SHAPES)).graph.as_graph_def()
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


@pytest.mark.parametrize("workers", [3, 16])
@pytest.mark.parametrize("codec", [None, "int8", "powersgd"])
def test_the_graph_of_a_step_hardly_grows_with_the_number_of_workers(codec, workers):
    with_two = nodes(codec, 2)
    assert abs(nodes(codec, workers) - with_two) <= 0.1 * with_two
