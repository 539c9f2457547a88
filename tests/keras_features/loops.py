"""Custom loops, steps of the user's own, and more than one model."""

import dataclasses
import enum

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_features.models import Subclassed
from keras_features.table import BATCH, built, data, fit, mlp, outcome, row


@row()
def custom_loop(place):
    strategy = place.strategy or tf.distribute.get_strategy()
    with place.scope():
        model = mlp()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        model.optimizer = optimizer
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data(36)).batch(BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    losses = [float(train(batch)) for _ in range(2) for batch in dataset]
    return outcome(model, losses=losses)


@row()
def custom_loop_clips_and_scales(place):
    strategy = place.strategy or tf.distribute.get_strategy()
    with place.scope():
        model = mlp()
        model.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=0.05))
        model.optimizer.build(model.trainable_variables)
    optimizer = place.strategy.distributed_optimizer(model.optimizer) if place.strategy else model.optimizer
    x, y = data(40)
    x[20] = np.inf
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function
    def train(batch):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(loss_of(y, model(x))) / BATCH)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(step, args=batch)

    for batch in dataset:
        train(batch)
    return outcome(model, scale=model.optimizer.dynamic_scale)


@row()
def custom_loop_with_a_traced_step(place):
    """The step given to `strategy.run` is a `tf.function`, and its `if` is turned into a branch."""
    strategy = place.strategy or tf.distribute.get_strategy()
    with place.scope():
        model = keras.Sequential([layers.Input((6,)), layers.BatchNormalization(synchronized=True), layers.Dense(3)])
        model.optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
        model.optimizer.build(model.trainable_variables)
    optimizer = place.strategy.distributed_optimizer(model.optimizer) if place.strategy else model.optimizer
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data(36)).batch(BATCH))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
            if tf.reduce_sum(tf.cast(y, tf.float32)) < -1.0:
                loss = 0.0 * loss
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in dataset]
    return outcome(model, losses=losses)


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Held:
    optimizer: keras.optimizers.Optimizer


class SeveralOptimizers(Subclassed):
    """Applies one optimizer twice a step, some that are kept in other things, and one in a branch every other step."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.others = [keras.optimizers.SGD(0.1, global_clipnorm=0.1)]
        self.pair = (keras.optimizers.SGD(0.02, clipnorm=0.05), None)
        self.held = Held(keras.optimizers.SGD(0.03, clipvalue=0.01))
        self.seldom = keras.optimizers.SGD(0.05, clipvalue=0.02)
        self.last = keras.optimizers.SGD(0.1)
        self.kind = Kind.ONE  # Whose class no optimizer is to be sought in.

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            self.optimizer.apply(*self.gradients(x, y))
        for optimizer in (self.others[0], self.pair[0], self.held.optimizer):
            optimizer.apply(*self.gradients(x, y))
        gradients, variables = self.gradients(x, y, scaled=True)  # One loss, of two optimizers.
        self.optimizer.apply(gradients[:2], variables[:2])
        self.last.apply(gradients[2:], variables[2:])
        gradients, variables = self.gradients(x, y)
        if not self.seldom.built:
            self.seldom.build(variables)
        due = tf.equal(self.optimizer.iterations.value % 4, 0)
        tf.cond(due, lambda: self.apply_seldom(gradients, variables), lambda: tf.zeros([]))
        rate = self.optimizer.learning_rate
        return {**self.compute_metrics(x, y, self(x)), "rate": rate, "steps": self.optimizer.iterations, "due": due}

    def apply_seldom(self, gradients, variables):
        self.seldom.apply(gradients, variables)
        return tf.zeros([])

    def gradients(self, x, y, *, scaled=False):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss = self.optimizer.scale_loss(loss) if scaled else loss
        variables = self.trainable_variables
        return tape.gradient(loss, variables), variables


@row()
def several_optimizers_in_a_custom_step(place):
    model = built(place, SeveralOptimizers, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2))
    x, y = data(37)
    return outcome(model, fit(model, x, y))


class UpdatesInALoop(Subclassed):
    """Several updates in a step, in a loop of TensorFlow's."""

    def train_step(self, data):
        x, y = data
        self(x)
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)

        def update(number):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return [number + 1]

        tf.while_loop(lambda number: number < 3, update, [tf.constant(0)])
        return self.compute_metrics(x, y, self(x))


# Two replicas of a process have a loop each, by which TensorFlow tells collectives apart.
@row()
def updates_in_a_loop(place):
    model = built(place, UpdatesInALoop, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2))
    x, y = data(37)
    return outcome(model, fit(model, x, y))


@row()
def two_models(place):
    first, second = built(place), built(place, Subclassed, optimizer="adam")
    x, y = data(20)
    for _ in range(2):
        fit(first, x, y)
        history = fit(second, x, y)
    return outcome(second, history, first=first.get_weights()[0])


class OfManyParts(Subclassed):
    """Takes batches apart as only it can; tells one optimizer more than Keras does, and does not hold the other."""

    def __init__(self, elsewhere):
        super().__init__()
        self.step_of = lambda gradients, variables: elsewhere.apply(gradients, variables)

    def train_step(self, data):
        x, y, shift, _ = data
        variables = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x + shift, training=True), from_logits=True)
            mean = tf.reduce_mean(losses)
            loss = mean / tf.distribute.get_strategy().num_replicas_in_sync  # as `compute_loss` has it
        self.optimizer.apply(tape.gradient(loss, variables), variables, loss=loss)
        self.step_of(tape.gradient(loss, variables), variables)
        return {"mean": mean}


class ToldTheLoss(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None, loss=None):
        assert loss is not None
        return super().apply(grads, trainable_variables)


@row()
def batches_of_many_parts(place):
    with place.scope():
        elsewhere = keras.optimizers.Adam(0.01)
        model = OfManyParts(elsewhere)
        model.compile(ToldTheLoss(0.1))
        model(np.zeros((1, 6)))
        elsewhere.build(model.trainable_variables)
    x, y = data(37)
    parts = tf.data.Dataset.from_tensor_slices((x, y, 0.1 * x[::-1], y)).batch(BATCH)
    return outcome(model, model.fit(parts, verbose=0).history)


class Delegating(keras.optimizers.SGD):
    """Has another optimizer do the work, as wrappers do that average weights."""

    def __init__(self, inner):
        super().__init__(0.1)
        self.inner = inner

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.inner.apply(grads, trainable_variables)
        self.iterations.assign_add(1)


@row()
def optimizer_that_delegates(place):
    model = built(place, optimizer=lambda: Delegating(keras.optimizers.Adam(0.01)))
    x, y = data(37)
    return outcome(model, fit(model, x, y))


class LooksAhead(Subclassed):
    """Takes gradients where each replica's own lead (SAM), lets another layer follow, and centres outputs at first."""

    def __init__(self):
        super().__init__()
        self.followed, self.centred = layers.Dense(3), layers.Dense(3)

    def build(self, shape):
        super().build(shape)
        self.followed.build(shape)
        self.centred.build(shape)

    def train_step(self, data):
        x, y = data
        variables = super().trainable_variables[:4]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        ahead = [0.3 * gradient for gradient in tape.gradient(loss, variables)]
        for variable, step in zip(variables, ahead, strict=True):
            variable.assign_add(step)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, variables)
        for variable, step in zip(variables, ahead, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply(gradients, variables)
        self.followed.bias.assign(0.9 * self.followed.bias + 0.1 * variables[-1])
        first = tf.equal(self.optimizer.iterations.value, 1)
        bias, rows = self.centred.bias, self.centred(x)
        bias.assign(tf.where(first, -tf.reduce_mean(rows, axis=0), bias))
        return {"loss": loss}

    @property
    def trainable_variables(self):
        return super().trainable_variables[:4]


@row(exempt="each replica looks ahead by the gradient of its own rows")
def weights_assigned_in_a_step(place):
    model = built(place, make=LooksAhead)
    return outcome(model, fit(model, *data(37)))
