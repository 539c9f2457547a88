"""Rows for custom loops, custom steps, and more than one model."""

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


@row(placements=("1x2",))
def custom_loop_with_a_traced_step(place):
    """The step passed to `strategy.run` is a `tf.function`, and its `if` becomes a branch of the graph."""
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
    """Applies one optimizer twice per step, some optimizers of other objects, and one in a branch in some steps."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.others = [keras.optimizers.SGD(0.1, global_clipnorm=0.1)]
        self.pair = (keras.optimizers.SGD(0.02, clipnorm=0.05), None)
        self.held = Held(keras.optimizers.SGD(0.03, clipvalue=0.01))
        self.seldom = keras.optimizers.SGD(0.05, clipvalue=0.02)
        self.last = keras.optimizers.SGD(0.1)
        self.kind = Kind.ONE  # an enum; the search for optimizers must not descend into its class

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            self.optimizer.apply(*self.gradients(x, y))
        for optimizer in (self.others[0], self.pair[0], self.held.optimizer):
            optimizer.apply(*self.gradients(x, y))
        gradients, variables = self.gradients(x, y, scaled=True)  # one loss for two optimizers
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
    """Applies several updates per step, in a loop of the graph."""

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


# Each replica of a process has its own loop, by which TensorFlow distinguishes collectives.
@row(placements=("1x2",))
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
    """Unpacks batches itself, passes an extra argument to one optimizer, and holds the other only in a lambda."""

    def __init__(self, elsewhere):
        super().__init__()
        self.step_of = lambda gradients, variables: elsewhere.apply(gradients, variables)

    def train_step(self, data):
        x, y, shift, _ = data
        variables = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x + shift, training=True), from_logits=True)
            mean = tf.reduce_mean(losses)
            loss = mean / tf.distribute.get_strategy().num_replicas_in_sync  # as in `compute_loss`
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
    """Delegates to another optimizer, like wrappers that average weights."""

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
    """Uses gradients at weights moved by the replica's own gradients (SAM), and assigns means to other layers."""

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


@row(placements=("1x2",), exempt="each replica looks ahead by the gradient of its own rows")
def weights_assigned_in_a_step(place):
    model = built(place, make=LooksAhead)
    return outcome(model, fit(model, *data(37)))


class Adversarial(keras.Model):
    """Two models with two optimizers, in a custom step without a `call`, like the GANs on keras.io."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = (
            keras.Sequential([layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(outputs)])
            for outputs in (3, 1)
        )

    def compile(self):
        super().compile()
        self.of_generator, self.of_critic = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, clipnorm=0.1)
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        self.means = [keras.metrics.Mean(name="generator"), keras.metrics.Mean(name="critic")]

    @property
    def metrics(self):
        return self.means

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        latent, real = x[:, :3], x[:, 3:]
        ones, replicas = tf.ones([tf.shape(x)[0], 1]), tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            both = tf.concat([self.critic(self.generator(latent)), self.critic(real)], axis=0)
            critic_loss = self.loss_of(tf.concat([ones, 0 * ones], axis=0), both)
        variables = self.critic.trainable_weights
        self.of_critic.apply_gradients(zip(tape.gradient(critic_loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            loss = self.loss_of(0 * ones, self.critic(self.generator(latent)))
        variables = self.generator.trainable_weights
        self.of_generator.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for mean, value in zip(self.means, (loss, critic_loss), strict=True):
            mean.update_state(value * replicas, sample_weight=tf.shape(x)[0])
        return {mean.name: mean.result() for mean in self.means}


@row()
def adversarial_models_without_a_call(place):
    with place.scope():
        model = Adversarial()
        model.compile()
    return outcome(model, fit(model, data(33)[0]))


class Variational(keras.Model):
    """Computes its loss in the step, with the optimizer of `compile`, without a `call`."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Input((6,)), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(6)])  # The first step builds it.
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            center, log_variance = tf.split(self.encoder(x), 2, axis=1)
            code = center + tf.exp(0.5 * log_variance) * tf.sin(100 * x[:, :2])
            losses = tf.reduce_mean((x - self.decoder(code)) ** 2, axis=1)
            losses += 0.1 * tf.reduce_sum(center**2 + tf.exp(log_variance) - log_variance - 1, axis=1)
            loss = tf.reduce_mean(losses) / tf.distribute.get_strategy().num_replicas_in_sync
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.mean.update_state(losses)
        return {"loss": self.mean.result()}


@row()
def variational_model_without_a_call(place):
    with place.scope():
        model = Variational()
        model.compile(keras.optimizers.Adam(0.01))
    return outcome(model, fit(model, data(33)[0]))


def _mean(model, x, y):
    return tf.reduce_mean(model.losses_of(x, y))


def _mean_and_keras_loss(model, x, y):
    return 0.5 * _mean(model, x, y) + model.compute_loss(x=x, y=y, y_pred=model(x, training=True))


def _sum_by_the_global_batch(model, x, y):
    return tf.reduce_sum(model.losses_of(x, y)) / BATCH


def _average_loss(model, x, y):
    return tf.nn.compute_average_loss(model.losses_of(x, y))


def _average_loss_of_the_global_batch(model, x, y):
    return tf.nn.compute_average_loss(model.losses_of(x, y), global_batch_size=BATCH)


def _gradient_penalty(model, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x, training=True)
    norms = tf.reduce_sum(tape.gradient(outputs, x) ** 2, axis=1)
    return tf.reduce_mean((norms - 1.0) ** 2) + _mean(model, x, y)


def _sum_by_the_static_rows(model, x, y):
    losses = model.losses_of(tf.concat([x[:, :-1], tf.ones([x.shape[0], 1])], axis=1), y)
    return tf.reduce_sum(losses) / x.shape[0]


def _sum_by_the_rows(model, x, y):
    rows = tf.shape(x)[0]
    losses = model.losses_of(tf.concat([x[:, :-1], tf.ones([rows, 1])], axis=1), y)
    return tf.reduce_sum(losses) / tf.cast(rows, tf.float32)


def _square_of_the_global_mean(model, x, y):
    context = tf.distribute.get_replica_context()
    total = context.all_reduce("SUM", tf.reduce_sum(model(x), axis=0))
    rows = context.all_reduce("SUM", tf.cast(tf.shape(x)[0], tf.float32))
    return tf.reduce_sum((total / rows) ** 2) + _mean(model, x, y)


def _square_of_the_gathered_mean(model, x, y):
    everyones = tf.distribute.get_replica_context().all_gather(model(x), axis=0)
    return tf.reduce_sum(tf.reduce_mean(everyones, axis=0) ** 2)


class ByRecipe(Subclassed):
    """A step with a custom loss, as users write it for one device."""

    recipe = staticmethod(_mean)

    def losses_of(self, x, y):
        outputs = self(x, training=True)
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.recipe(self, x, y)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"objective": loss}


class ByKerasStep(Subclassed):
    """Keras' own step with a custom loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_mean(losses) + super().compute_loss(x, y, y_pred, sample_weight, training)


def _by_recipes(place, recipes, optimizer=lambda: keras.optimizers.SGD(0.3), make=ByRecipe):
    """Returns the weights after a short training by each recipe, with a short last batch."""
    x, y = data(3 * BATCH + 5)
    weights = {}
    for recipe in recipes:
        keras.utils.set_random_seed(1)
        model = built(place, make, optimizer=optimizer, metrics=None)
        model.recipe = recipe
        history = fit(model, x, y)
        weights |= {f"{recipe.__name__} {i}": weight for i, weight in enumerate(model.get_weights())}
    return outcome(model, history, **weights)


@row(placements=("1x2",))
def means_of_steps_as_on_one_device(place):
    return _by_recipes(place, [_mean_and_keras_loss, _average_loss])


@row(same_bits=False)
def steps_of_a_static_number_of_rows(place):
    x, y = data(3 * BATCH)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    model = built(place, ByRecipe, optimizer=lambda: keras.optimizers.SGD(0.3), metrics=None)
    # Several workers do not know the number of rows while tracing.
    knows_rows = place.name.startswith(("single", "1x"))
    model.recipe = _sum_by_the_static_rows if knows_rows else _sum_by_the_rows
    history = model.fit(dataset, epochs=2, verbose=0).history
    endless = model.fit(dataset.repeat(), steps_per_epoch=4, verbose=0).history
    return outcome(model, history, endless=endless["objective"])


@row(same_bits=False)
def gradient_penalty_in_a_step(place):
    return _by_recipes(place, [_gradient_penalty], lambda: keras.optimizers.SGD(0.01))


@row()
def sums_by_the_global_batch(place):
    results = _by_recipes(place, [_sum_by_the_global_batch, _average_loss_of_the_global_batch])
    return {**results, "history": {}}  # For a sum, the mean over replicas differs from one device's log.


@row(placements=("2x1",))
def losses_of_what_replicas_exchange(place):
    return _by_recipes(place, [_square_of_the_global_mean, _square_of_the_gathered_mean])


@row()
def scaled_losses_of_steps(place):
    scaler = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.1))  # noqa: E731
    return _by_recipes(place, [_mean, _average_loss], scaler)


@row()
def a_mean_in_compute_loss(place):
    model = built(place, ByKerasStep)
    x, y = data(3 * BATCH + 5)
    return outcome(model, fit(model, x, y), evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


class Autoencoder(keras.Model):
    """Uses its input as targets, in its steps only. Loss and metrics accept no other targets."""

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=[x, x], y_pred=outputs)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, [x, x], outputs)

    def test_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x)
        self.compute_loss(x=x, y=[x, x], y_pred=outputs)
        return self.compute_metrics(x, [x, x], outputs)


@row()
def autoencoder_with_losses_of_its_input(place):
    def make():
        inputs = layers.Input((6,))
        code = layers.Dense(3, activation="tanh")(inputs)
        return Autoencoder(inputs, [layers.Dense(6)(code), layers.Dense(6)(code)])

    model = built(place, make, loss=["mse", "mae"], metrics=[["mae"], ["mse"]])
    x, _ = data(33)
    return outcome(model, fit(model, x), evaluated=model.evaluate(x, batch_size=BATCH, verbose=0))
