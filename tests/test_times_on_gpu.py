"""How graphs for a GPU wait for the moments whose times they note. No GPU is needed to build them."""

import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
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


@pytest.mark.parametrize("rows", [None, 3])
def test_a_step_of_one_replica_exchanges_nothing_with_the_host_but_sizes_and_the_result_before(rows):
    """TensorFlow's copies between host and GPU wait for all kernels, so a copy in the step would stop the GPU."""
    with tf.Graph().as_default() as graph:
        with tf.device(GPU):
            batch = tf.compat.v1.placeholder(tf.float32, [rows, 4])
            clock = Clock(GPU)
            step = len(graph.get_operations())
            clock.run_ahead(lambda data: {"loss": tf.reduce_mean(data)}, batch)
    operations = graph.get_operations()[step:]
    on_host = {operation for operation in operations if "CPU" in operation.device}
    needed = {operation: _sources(operation) for operation in operations}
    to_host = [source for each in on_host for source in needed[each] if "GPU" in source.device]
    to_gpu = [source for each in set(operations) - on_host for source in needed[each] if "CPU" in source.device]

    assert to_gpu == []
    assert sorted(source.type for source in to_host) == (["Shape", "Sum"] if rows is None else ["Sum"])
    (result,) = [source for source in to_host if source.type == "Sum"]
    assert batch.op not in _all_sources(result)


def _sources(operation):
    return {*(each.op for each in operation.inputs), *operation.control_inputs}


def _all_sources(operation):
    found, ahead = set(), [operation]
    while ahead:
        new = _sources(ahead.pop()) - found
        found |= new
        ahead.extend(new)
    return found


def test_a_step_that_runs_ahead_reports_its_time_and_trains_like_keras(monkeypatch):
    """A CPU stands for the GPU. It computes a step while TensorFlow has not yet returned to Python."""
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    reports = strategy.reports
    monkeypatch.setattr(reports.clock(0), "is_on_gpu", True)
    monkeypatch.setattr(reports, "_runs_ahead", True)
    told = []
    reports.listeners.append(told.append)

    def train(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((3,)), Slow(), keras.layers.Dense(1)])
            model.compile("adam", "mse", jit_compile=False)
        model.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    for own, expected in zip(train(strategy.scope()), train(contextlib.nullcontext()), strict=True):
        np.testing.assert_array_equal(own, expected)
    assert [report.rows.tolist() for report in told] == [[8], [8], [4]] * 2
    # The first report comes before a step is computed.
    assert all(report.compute_seconds[0] >= 0.9 * Slow.SECONDS for report in told[1:])


class Slow(keras.layers.Layer):
    SECONDS = 0.05

    def call(self, x):
        def wait(values):
            time.sleep(self.SECONDS)
            return values

        return x + 0 * tf.ensure_shape(tf.numpy_function(wait, [tf.stop_gradient(x)], x.dtype), x.shape)
