"""How graphs for a GPU wait for the moments whose times they note. No GPU is needed to build them."""

import contextlib
import threading
import time
import types
from concurrent.futures import Executor, Future

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from launched import eventually
from tfdist.strategies.ahead_clock import AheadClock
from tfdist.strategies.collectives.stopwatch import computed_by
from tfdist.strategies.datasets import are_kept_on_host
from tfdist.strategies.step_clock import ASKED, Clock

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

    assert (path[0].type, "CPU" in path[0].device) == ("PlaceholderWithDefault", True)
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
            before = set(graph.get_operations())
            noted = clock.known(0, [number]) if known else clock.mark(0, [number])
        (sent,) = sent_to_host(graph, before)

    assert number.op in all_sources(noted.op)
    assert (sent.type, sent.outputs[0].dtype) == (
        ("PlaceholderWithDefault", tf.int32) if known else ("Sum", tf.float64)
    )


def test_a_time_waits_for_a_number_that_it_stores_too():
    """TensorFlow leaves out a control dependency of a call on its own argument, and the call would note at once."""
    with tf.Graph().as_default():
        loss = tf.compat.v1.placeholder(tf.float64, [])
        noted = Clock("CPU:0").mark(0, [loss])

    assert loss.op in noted.op.control_inputs


@pytest.mark.parametrize("kind", [Clock, AheadClock])
def test_a_step_does_not_wait_for_the_gpu_to_note_when_its_batch_has_arrived(kind):
    with tf.Graph().as_default() as graph:
        with tf.device(GPU):
            batch = tf.compat.v1.placeholder(tf.float32, [3, 4])
            clock = kind(GPU)
            before = set(graph.get_operations())
            (begun,) = clock.begin([batch])
        assert begun is batch
        assert [each.outputs[0].dtype for each in sent_to_host(graph, before)] == [tf.int32]


def test_a_step_that_is_launched_ahead_copies_nothing_between_host_and_gpu():
    """Numbers of type int32 are in the memory of the host, so they take no copy."""
    with tf.Graph().as_default() as graph:
        with tf.device(GPU):
            batch = tf.compat.v1.placeholder(tf.float32, [None, 4])
            clock = AheadClock(GPU)
            before = set(graph.get_operations())
            clock.mark(ASKED)
            launched = clock.trained({"loss": tf.reduce_mean(clock.begin(batch))}, [])
        sent = sent_to_host(graph, before)
        to_gpu = [
            source
            for each in set(graph.get_operations()) - before
            if "GPU" in each.device
            for source in sources(each)
            if "CPU" in source.device and source not in before
        ]

    assert {each.outputs[0].dtype for each in sent} == {tf.int32}
    assert to_gpu == []
    assert batch.op in all_sources(launched.op)


@pytest.mark.parametrize(
    ("dtypes", "kept"), [(["int32"], True), (["int32", "int32"], True), (["int32", "int64"], False), (["uint8"], False)]
)
def test_batches_stay_on_the_host_where_a_gpu_would_copy_them_back(dtypes, kept):
    dataset = tf.data.Dataset.from_tensors(tuple(tf.zeros([3], dtype) for dtype in dtypes))
    assert are_kept_on_host(dataset) == kept


def test_batches_that_stay_on_the_host_give_the_results_of_keras():
    def train(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 5)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        tokens = np.arange(48, dtype="int32").reshape(12, 4) % 5
        dataset = tf.data.Dataset.from_tensor_slices((tokens, tokens)).batch(5)
        losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
        return [*losses, model.evaluate(dataset, verbose=0), *model.get_weights()]

    strategy = tfdist.MirroredStrategy(["CPU:0"])
    for own, expected in zip(train(strategy.scope()), train(contextlib.nullcontext()), strict=True):
        np.testing.assert_array_equal(own, expected)


def sent_to_host(graph, before):
    """Returns the operations on the GPU that an operation on the host, made after `before`, uses."""
    on_host = [each for each in graph.get_operations() if "CPU" in each.device and each not in before]
    return {source for each in on_host for source in sources(each) if "GPU" in source.device}


def sources(operation):
    return {*(each.op for each in operation.inputs), *operation.control_inputs}


def all_sources(operation):
    found, ahead = set(), [operation]
    while ahead:
        new = sources(ahead.pop()) - found
        found |= new
        ahead.extend(new)
    return found


def test_a_step_that_is_launched_ahead_reports_the_step_before_and_trains_like_keras(monkeypatch):
    """A CPU stands for the GPU. No thread waits for it, as a busy processor could start the thread late."""
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    clock = AheadClock("CPU:0")
    monkeypatch.setattr(clock, "_thread", ImmediateExecutor())
    monkeypatch.setattr(strategy.reports, "_clocks", [clock])
    told, phases = [], []
    strategy.reports.listeners.append(lambda report: (told.append(report), phases.append(strategy.reports.phases())))

    def train(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((3,)), Slow(), keras.layers.Dense(1)])
            model.compile("adam", "mse", jit_compile=False)
        for _ in range(2):
            model.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=8, verbose=0, callbacks=[SlowCallback()])
        return model.get_weights()

    for own, expected in zip(train(strategy.scope()), train(contextlib.nullcontext()), strict=True):
        np.testing.assert_array_equal(own, expected)
    assert [report.rows.tolist() for report in told] == [[8], [8], [4]] * 2
    of_first, of_others = told[::3], [*told[1:3], *told[4:]]
    assert [report.compute_seconds.tolist() for report in of_first] == [[0], [0]]
    assert all(report.compute_seconds[0] >= 0.9 * Slow.SECONDS for report in of_others)
    assert all(each.outside >= 0.9 * SlowCallback.SECONDS for each in (phases[2], phases[5]))


def test_a_replica_computes_until_the_gpu_has_computed_its_launched_steps(monkeypatch):
    done = threading.Event()
    clock = AheadClock("CPU:0")
    monkeypatch.setattr(clock, "_result", types.SimpleNamespace(numpy=lambda: done.wait(60)))
    assert not clock.is_computing

    assert clock.phases_before(clock.read(), 1).seconds == 0
    assert clock.is_computing

    done.set()
    clock.phases_before(clock.read(), 1)
    assert eventually(lambda: not clock.is_computing)


class ImmediateExecutor(Executor):
    def submit(self, function, /, *args):
        done = Future()
        done.set_result(function(*args))
        return done


class Slow(keras.layers.Layer):
    SECONDS = 0.05

    def build(self, shape):
        self.bias = self.add_weight(shape=shape[-1:])

    def call(self, x):
        """The backward pass takes a while, so that the logs are ready long before the gradients."""

        def wait(values):
            time.sleep(self.SECONDS)
            return values

        @tf.custom_gradient
        def slow(x):
            return tf.identity(x), lambda dy: tf.ensure_shape(tf.numpy_function(wait, [dy], dy.dtype), dy.shape)

        return slow(x + self.bias)


class SlowCallback(keras.callbacks.Callback):
    SECONDS = 0.03

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.SECONDS)
