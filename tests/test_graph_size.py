"""The graph of a step hardly grows with the number of workers. No graph runs here, so no worker starts."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.chosen_codecs import CodecsToChoose
from tfdist.strategies.collectives.encoded_reducer import EncodedReducer
from tfdist.strategies.collectives.exchange_inboxes import ExchangeInboxes
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.compression import from_name

# A network with three dense layers: the large weights are encoded, the rest travels raw.
SHAPES = ([256, 640], [640], [640, 640], [640], [640, 10], [10])
ENCODED = (0, 2)


class Unconnected(PeerExchange):
    """The exchanges of one of several workers in a graph that never runs, without connections and threads."""

    def __init__(self, workers):
        self._names, self._members = range(workers), {}
        self._inboxes = ExchangeInboxes(0, lambda labels, key, rows: key)


@functools.cache
def graph_of(codec, workers, shapes=SHAPES, encoded=ENCODED):
    """Returns the graph of a step on workers with one CPU each; `codec` "auto" chooses among two."""
    options = tf.distribute.experimental.CommunicationOptions()
    collectives = Collectives(["/job:localhost/replica:0/task:0/device:CPU:0"], workers, options, CollectiveKeys(1))
    collectives.use(Unconnected(workers))
    is_fixed = codec not in (None, "auto")
    codecs = [from_name(codec) if is_fixed and i in encoded else None for i in range(len(shapes))]
    allowed = [from_name("float16"), from_name("int8")]
    to_choose = CodecsToChoose(allowed, lambda _, i: i in encoded, lambda *_: None) if codec == "auto" else None
    reducer = EncodedReducer([tf.zeros(shape) for shape in shapes], codecs, collectives, seed=0, to_choose=to_choose)
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

    rows = tf.TensorSpec([None, shapes[0][0]])
    return step.get_concrete_function(rows, *map(tf.TensorSpec, shapes)).graph.as_graph_def()


def nodes(codec, workers):
    """Returns the number of operations of a step, with those of its functions."""
    graph = graph_of(codec, workers)
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


@pytest.mark.parametrize("workers", [3, 16])
@pytest.mark.parametrize("codec", [None, "int8", "powersgd"])
def test_the_graph_of_a_step_hardly_grows_with_the_number_of_workers(codec, workers):
    with_two = nodes(codec, 2)
    assert abs(nodes(codec, workers) - with_two) <= 0.1 * with_two


def test_a_codec_that_was_not_chosen_is_few_operations_of_the_step():
    functions = {function.signature.name: function for function in graph_of("auto", 4).library.function}
    branches = [function for name, function in functions.items() if "indexed_case_branch" in name]
    raw, *coded = [[each for each in branches if f"branch{place}_" in each.signature.name] for place in range(3)]
    assert raw and all(len(each) == len(raw) for each in coded)
    for branch in (branch for each in coded for branch in each):
        (called,) = [node for node in branch.node_def if node.op == "StatefulPartitionedCall"]
        assert len(branch.node_def) < len(functions[called.attr["f"].func.name].node_def) / 2
        # TensorFlow replaces other calls by the operations of the function.
        assert functions[called.attr["f"].func.name].attr["_noinline"].b


def test_branches_of_a_choice_get_as_many_inputs_for_many_small_layers_as_for_few():
    inputs = []
    for layers in (2, 8):
        shapes = tuple(shape for _ in range(layers) for shape in ((256, 256), (256,)))
        functions = graph_of("auto", 4, shapes, tuple(range(0, 2 * layers, 2))).library.function
        # Those of the choice of codecs, and of the look for an Inf or NaN.
        branches = [each for each in functions if "case_branch" in each.signature.name or "cond" in each.signature.name]
        inputs.append(sorted(len(each.signature.input_arg) for each in branches))
    assert inputs[0] == inputs[1] and len(inputs[0]) > 4, inputs
