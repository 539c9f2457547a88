"""Functions that the tests of `compression="auto"` run in worker processes."""

import contextlib
import gc
import os
import weakref

import keras
import numpy as np
import tensorflow as tf

import tfdist
from backup_checks import await_save
from compressed_checks import BATCH, FEW, MODES, build, data
from keras_features import outcome, small_weights_too, strategy_of
from tfdist.backup import between_fits
from tfdist.backup.residual_states import ResidualStates
from tfdist.backup.state_provider import TrainedFit
from tfdist.strategies.codec_trials import CodecTrials, Numbers

AUTO = tfdist.compression.Auto(
    [
        tfdist.compression.Float16(min_elements=20, block_size=32),
        tfdist.compression.Int8(min_elements=20, block_size=16),
    ]
)
SLOW_LINK = {"no codec": 3.4, "float16": 1.7, "int8": 0.9}
FAST_LINK = {"no codec": 0.057, "float16": 0.075, "int8": 0.062}


@contextlib.contextmanager
def times_of_steps(seconds):
    """Gives the policy these times, by codec, in place of those of this machine."""
    measured = CodecTrials.take

    def take(self, numbers):
        invented = seconds[self._alternatives.describe(self.order.choice)]
        return measured(self, Numbers(invented, invented))

    CodecTrials.take = take
    try:
        yield
    finally:
        CodecTrials.take = measured


class Choices(keras.callbacks.Callback):
    """Notes after each batch the names of the codecs of kernels, and whether the choice is final."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def on_train_batch_end(self, batch, logs=None):
        chosen = self.model.distribute_strategy.communication.choices()[-1]
        names = {codec and codec.name for path, codec in chosen.codecs.items() if "kernel" in path}
        self.noted.append((sorted(names, key=str), chosen.is_final))


class Stop(keras.callbacks.Callback):
    """Ends training by an error at the begin of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise InterruptedError("a test")


def train(placement, seconds, mode="plain", epochs=6, **options):
    """Trains 10 steps an epoch. Returns the outcome, and the choice after each batch."""
    choices = Choices()
    small = small_weights_too() if options else contextlib.nullcontext()
    with times_of_steps(seconds), small:
        strategy = strategy_of(placement, AUTO, **options)
        model = build(strategy, widths=FEW, **MODES[mode])
        x, y = data()
        fitted = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False, callbacks=[choices])
    traffic = strategy.communication.traffic()
    return outcome(model, fitted.history) | {
        "choices": choices.noted,
        "sent_bytes": traffic.sent_bytes,
        "raw_bytes": traffic.raw_bytes,
    }


def unbroken_and_resumed(placement, folder):
    """Returns weights and choices of a training, and of its second half after a restart from a checkpoint."""
    x, y = data()
    results, path = [], None
    for epochs in ([3, 2], [2]):
        strategy_of.cache_clear()  # A new strategy, so that its state comes from the checkpoint only.
        strategy = strategy_of(placement, AUTO)
        worker = 0 if placement.startswith("1x") else strategy.cluster_resolver.task_id
        choices = Choices()
        with times_of_steps(SLOW_LINK):
            model = build(strategy)
            whole = tf.train.Checkpoint(model=model, communication=strategy.communication)
            if path:
                whole.read(path).expect_partial()
            for part in epochs:
                model.fit(x, y, batch_size=BATCH, epochs=part, verbose=0, shuffle=False, callbacks=[choices])
                path = path or whole.write(f"{folder}/state-{worker}")
        results.append((model.get_weights(), choices.noted[-10:]))
    return results


def backed_up(placement, folder, then=AUTO):
    """Returns the choices before and after a restart from a backup, after which `compression` is `then`."""
    x, y = data()
    noted = []
    for stop, auto in ((3, AUTO), (None, then)):
        strategy_of.cache_clear()
        choices = Choices()
        with times_of_steps(SLOW_LINK):
            model = build(strategy_of(placement, auto), widths=FEW)
            callbacks = [tfdist.callbacks.BackupAndRestore(folder), choices, Stop(stop)]
            with contextlib.suppress(InterruptedError):
                model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, shuffle=False, callbacks=callbacks)
        if stop:
            await_save()  # Otherwise the next `fit` removes the files that a save is still writing.
            between_fits.processes.pop(os.path.realpath(folder)).store.release()  # As in another process.
        noted.append(choices.noted)
    return noted


def names_in_a_commit(placement):
    """Returns the names of the codec states that a backup of a model with a `LossScaleOptimizer` saves."""
    strategy = strategy_of(placement, AUTO)
    model = build(strategy, widths=FEW, policy="mixed_float16")
    model.fit(*data(BATCH), batch_size=BATCH, verbose=0)
    return sorted(ResidualStates(TrainedFit(model)).capture().own)


def residuals_beside_a_gradient(placement, value):
    """Returns residuals before and after a step in which a gradient that `int8` does not encode has this value."""
    codecs = [
        tfdist.compression.Float16(min_elements=20, block_size=32),
        tfdist.compression.Int8(min_elements=1000, block_size=16),
    ]
    strategy = strategy_of(placement, tfdist.compression.Auto(codecs))
    with strategy.scope():
        variables = [tf.Variable(tf.ones([50, 40])), tf.Variable(tf.ones([5, 8]))]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(variables)
    gradient = tf.random.stateless_normal([50, 40], [1, 2])

    @tf.function
    def step(beside):
        strategy.run(lambda: optimizer.apply([gradient, tf.fill([5, 8], beside)], variables))

    step(tf.constant(1.0))
    exchange = strategy.communication.exchanges[-1]
    found = []
    for beside in (1.0, value):
        for control in exchange.controls:
            control.chosen.assign([2, 1])
        step(tf.constant(beside))
        found.append(np.concatenate([each.numpy().ravel() for each in exchange.residuals()]))
    return found


def frees_gradients(placement):
    """Returns whether the gradients of the first step are freed, although their exchange stays."""
    strategy = strategy_of(placement, AUTO)
    with strategy.scope():
        variables = [tf.Variable(tf.ones([9, 33]))]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(variables)
    gradients = [tf.ones([9, 33]) * 2]
    kept = [weakref.ref(each) for each in gradients]
    exchange = strategy.communication.exchange_of(optimizer, gradients, variables)
    del gradients
    gc.collect()
    return exchange.encodes, [each() is None for each in kept]


def train_in_a_loop(placement):
    """Trains in a loop of the user's own. Returns the number of traces, and the last choice."""
    strategy = strategy_of(placement, AUTO)
    with times_of_steps(SLOW_LINK), strategy.scope():
        variables = [tf.Variable(tf.ones([9, 33]))]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(variables)
        traces = []

        @tf.function
        def step():
            traces.append(1)
            strategy.run(lambda: optimizer.apply([tf.ones([9, 33])], variables))

        for _ in range(40):
            step()
    chosen = strategy.communication.choices()[-1]
    return len(traces), [codec.name for codec in chosen.codecs.values()], variables[0].numpy()
