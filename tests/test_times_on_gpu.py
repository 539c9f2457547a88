"""How graphs for a GPU wait for the moments whose times they note. No GPU is needed to build them."""

import tensorflow as tf

from tfdist.strategies.collectives.stopwatch import computed_by
from tfdist.strategies.step_report import Clock

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"


def test_a_time_waits_for_the_words_and_not_for_their_launch():
    """The host waits for a number of the words, which come to it by no integer operation, as those may run there."""
    with tf.Graph().as_default():
        with tf.device(GPU):
            words = tf.compat.v1.placeholder(tf.int32, [3, 4])
        (seen,) = computed_by(GPU, [words])
        path = [seen.op]
        while path[-1] is not words.op:
            path.append(path[-1].inputs[0].op)

    assert (path[0].type, "CPU" in path[0].device) == ("Identity", True)
    assert all("GPU" in operation.device for operation in path[1:])
    assert [operation.type for operation in path if operation.inputs and operation.inputs[0].dtype == tf.int32] == [
        "Bitcast"
    ]


def test_a_step_waits_for_the_launch_of_what_is_timed_and_not_for_the_host():
    with tf.Graph().as_default() as graph:
        with tf.device(GPU):
            batch = tf.compat.v1.placeholder(tf.float32, [3, 4])
            (begun,) = Clock(GPU).begin([batch])
        waited_for = set(begun.op.control_inputs)
        before = list(waited_for)
        while before:
            operation = before.pop()
            inputs = {*operation.control_inputs, *(each.op for each in operation.inputs)} - waited_for
            waited_for |= inputs
            before += inputs
        noted = [operation for operation in graph.get_operations() if "Call" in operation.type]

    assert batch.op in waited_for
    assert noted
    assert not waited_for & set(noted)
    assert all("GPU" in operation.device for operation in waited_for if operation.type != "Const")
