"""The choice of the operations for which gathers of weights wait, and of those that get a weight gathered again."""

import pytest
import tensorflow as tf

from tfdist.strategies.sharding import work_ahead
from tfdist.strategies.sharding.step_gathers import StepGathers
from tfdist.strategies.sharding.weight_uses import Uses


def kinds(operations):
    return {operation.type for operation in operations}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_only_the_backward_pass_gets_the_second_tensor(dtype):
    """Also if the forward pass has converted the weight."""

    @tf.function
    def step(weight, rows):
        whole = tf.identity(weight)
        with tf.GradientTape() as tape:
            tape.watch([whole, rows])
            loss = tf.reduce_sum(tf.square(rows @ tf.cast(whole, dtype)))
        gradients = tape.gradient(loss, [rows, whole])
        uses = Uses(whole)
        assert kinds(uses.all) == kinds(uses.backward) == {"MatMul"}
        assert len(uses.backward) == 1 and len(uses.all) == 2
        uses.replace_in_backward(tf.identity(weight) + 0)
        assert len(Uses(whole).all) == 1 and not Uses(whole).backward
        return gradients

    weight, rows = tf.random.normal([4, 3]), tf.cast(tf.random.normal([5, 4]), dtype)
    of_rows, of_weight = step(weight, rows)
    factor = 2 * (rows @ tf.cast(weight, dtype))
    tf.debugging.assert_near(of_rows, factor @ tf.transpose(tf.cast(weight, dtype)), rtol=1e-2, atol=1e-2)
    assert of_weight.shape == weight.shape


def test_a_gather_waits_for_the_uses_of_all_weights_but_the_last(monkeypatch):
    monkeypatch.setattr(work_ahead, "AHEAD_BYTES", 0)

    @tf.function
    def step(weights, rows):
        gathers, waits = StepGathers(), []
        for weight in weights:
            waits.append(gathers.before_first())
            whole = tf.reshape(weight, [4, 4])
            gathers.note(object(), whole, weight)
            rows = rows @ whole
        assert [len(each) for each in waits] == [0, 0, 1, 1]
        assert waits[2] != waits[3]
        return rows

    step([tf.eye(4)] * 4, tf.eye(4))


def test_sums_count_by_their_whole_gradients():
    @tf.function
    def step(gradients):
        gathers = StepGathers()
        for gradient in gradients:
            gathers.note_summed(tf.identity(gradient), whole_bytes=10 << 20)
        assert len(gathers.before_first()) == 2  # The last one takes 10 MiB, and two would take more than 16.

    step([tf.eye(4)] * 3)


def test_small_weights_are_gathered_without_waiting():
    @tf.function
    def step(weights, rows):
        gathers = StepGathers()
        for weight in weights:
            assert not gathers.before_first()
            whole = tf.reshape(weight, [4, 4])
            gathers.note(object(), whole, weight)
            rows = rows @ whole
        return rows

    step([tf.eye(4)] * 4, tf.eye(4))


def test_the_last_weight_and_assigned_ones_are_not_gathered_again():
    class Weight:
        pass

    @tf.function
    def step(value):
        gathers, weights, keys = StepGathers(), [Weight(), Weight(), Weight()], [object(), object(), object()]
        for key, weight in zip(keys, weights, strict=True):
            gathers.note(key, tf.identity(value), weight)
        gathers.note_assigned(weights[1])
        assert [gathers.taken(key) is not None for key in keys] == [True, False, False]
        assert gathers.taken(keys[0]) is None
        return value

    step(tf.eye(4))
