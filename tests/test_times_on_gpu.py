"""How graphs for a GPU wait for the moments whose times they note. No GPU is needed to build them."""

import pytest
import tensorflow as tf

from tfdist.strategies.collectives.stopwatch import computed_by
from tfdist.strategies.step_clock import Clock

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


@pytest.mark.parametrize("known", [True, False])
def test_only_a_time_that_needs_the_gpu_waits_for_a_copy_from_it(known):
    """TensorFlow's copy from a GPU waits for all kernels that the GPU has been given."""
    with tf.Graph().as_default() as graph:
        with tf.device(GPU):
            number = tf.compat.v1.placeholder(tf.float32, [])
            clock = Clock(GPU)
            clock.known(0, [number]) if known else clock.mark(0, [number])
        on_host = [each for each in graph.get_operations() if "CPU" in each.device]
        copied = [source for each in on_host for source in each.inputs if "GPU" in source.device]
        waiting = [each for each in on_host if number.op in each.control_inputs]

    assert bool(copied) != known
    assert bool(waiting) == known


def test_a_step_does_not_wait_for_the_gpu_to_note_when_its_batch_has_arrived():
    with tf.Graph().as_default() as graph:
        with tf.device(GPU):
            batch = tf.compat.v1.placeholder(tf.float32, [3, 4])
            (begun,) = Clock(GPU).begin([batch])
        on_host = [each for each in graph.get_operations() if "CPU" in each.device]

    assert [each for each in begun.op.control_inputs if "CPU" in each.device]
    assert not [source for each in on_host for source in each.inputs if "GPU" in source.device]
