"""Rows for optimizers, their options and wrappers."""

import functools

import keras
import numpy as np

from keras_features.table import built, compiled, data, fit, mlp, outcome, row


def _optimizer_row(name, tolerance=1e-5, placements=(), **arguments):
    def run(place):
        model = built(place, optimizer=lambda: getattr(keras.optimizers, name)(**arguments), metrics=[])
        x, y = data(77 if "gradient_accumulation_steps" not in arguments else 46)
        return outcome(model, fit(model, x, y))

    suffix = "_".join(["", *arguments]) if arguments else ""
    run.__name__ = f"optimizer_{name.lower()}{suffix}"
    row(placements=placements, tolerance=tolerance)(run)


for _name in ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion"):
    _optimizer_row(_name)


_optimizer_row("Lamb")


_optimizer_row("Muon", exclude_layers=["dense_1"])


_optimizer_row("SGD", momentum=0.9, nesterov=True)


_optimizer_row("SGD", gradient_accumulation_steps=3)


_optimizer_row("Adam", placements=("1x2",), gradient_accumulation_steps=2, global_clipnorm=0.3)


@row()
def optimizer_schedulefreeadamw(place):
    with place.scope():
        model, optimizer = mlp(), keras.optimizers.ScheduleFreeAdamW(0.01, warmup_steps=3)
        optimizer.build(model.trainable_variables)  # Built in a first step without a strategy, it would start at zeros.
        compiled(model, optimizer)
    x, y = data(37)
    return outcome(model, fit(model, x, y, validation_data=(x, y), epochs=2))


@row()
def gradients_accumulated_eagerly(place):
    optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)  # noqa: E731
    model = built(place, optimizer=optimizer, metrics=[], run_eagerly=True)
    return outcome(model, fit(model, *data(46)))


_optimizer_row("SGD", clipnorm=0.1)


_optimizer_row("SGD", clipvalue=0.01)


_optimizer_row("SGD", global_clipnorm=0.1)


_optimizer_row("SGD", use_ema=True, ema_overwrite_frequency=3)


_optimizer_row("SGD", weight_decay=0.1)


_optimizer_row("SGD", loss_scale_factor=8.0)


@row()
def learning_rate_schedule(place):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = built(place, optimizer=lambda: keras.optimizers.SGD(schedule))
    return outcome(model, fit(model))


@row()
def loss_scaling(place):
    inner = functools.partial(keras.optimizers.SGD, global_clipnorm=0.1)
    model = built(place, optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner(), dynamic_growth_steps=4))
    return outcome(model, fit(model), scale=model.optimizer.dynamic_scale)


@row(placements=("1x2",))
def loss_scaling_skips_inf(place):
    """A row of one replica overflows, so all replicas skip the step."""
    model = built(place, optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), metrics=[])
    x, y = data()
    x[20] = np.inf
    fit(model, x, y)
    return outcome(model, scale=model.optimizer.dynamic_scale, steps=model.optimizer.iterations)


@row(tolerance=2e-2)
def mixed_float16(place):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = built(place)
    return outcome(model, fit(model), scale=model.optimizer.dynamic_scale)


@row(tolerance=5e-2)
def mixed_bfloat16(place):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = built(place)
    return outcome(model, fit(model))


@row(placements=("1x2",))
def optimizer_multi(place):
    def make():
        inner = keras.optimizers.SGD(0.1, global_clipnorm=0.05), keras.optimizers.Adam(0.01)
        if not hasattr(keras.optimizers, "MultiOptimizer"):
            return inner[0]  # Keras 3.12 and 3.13 lack it.
        return keras.optimizers.MultiOptimizer(lambda variable: inner["bias" in variable.path])

    model = built(place, optimizer=make)
    x, y = data(37)
    return outcome(model, fit(model, x, y))
