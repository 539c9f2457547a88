"""How tfdist wraps Keras' functions and models: rebuilt functions, and models of other strategies."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfdist.faults.activity import Activity
from tfdist.strategies import outside_scope
from tfdist.strategies.keras_calls import NotedFunction


@pytest.fixture
def unwatched(monkeypatch):
    """Resets the guard, as in a process that has created no strategy yet."""
    monkeypatch.setattr(outside_scope._Guard, "watching", None)
    monkeypatch.setattr(outside_scope._Guard, "workers", 1)
    yield
    if outside_scope._Guard.watching is not None:
        outside_scope._Guard.watching.__exit__(None, None, None)


def compiled(inside, outside):
    with inside:
        model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    with outside:
        model.compile("sgd", "mse")
    return model


def in_creator_scope():
    return tf.variable_creator_scope(lambda next_creator, **kwargs: next_creator(**kwargs))


@pytest.mark.parametrize("sets", [True, False])
def test_a_function_that_is_only_returned_runs_too(sets):
    class Own(keras.Model):
        def make_train_function(self, force=False):
            if sets:
                self.train_function = lambda batch: batch + 1
            return lambda batch: batch + 1

    model = Own()
    noted = model.train_function = NotedFunction(model, "train_function", None, Activity())

    assert [noted(1), noted(2)] == [2, 3]
    assert model.train_function is noted


@pytest.mark.parametrize("around", [in_creator_scope, lambda: tf.distribute.OneDeviceStrategy("CPU:0").scope()])
def test_a_scope_around_the_creation_of_a_strategy_can_be_left(around, unwatched):
    with around():
        outside_scope.watch_models_outside(2)
    outside_scope.watch_models_outside(2)

    assert "train_step" in vars(compiled(in_creator_scope(), in_creator_scope()))


def test_only_models_made_outside_of_all_scopes_are_refused(unwatched):
    outside_scope.watch_models_outside(2)
    of_one_device = tf.distribute.OneDeviceStrategy("CPU:0")
    made = {
        "outside": compiled(in_creator_scope(), in_creator_scope()),
        "inside": compiled(of_one_device.scope(), of_one_device.scope()),
        "compiled outside": compiled(of_one_device.scope(), in_creator_scope()),
    }

    assert [name for name, model in made.items() if "train_step" in vars(model)] == ["outside"]
    made["compiled outside"].fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
