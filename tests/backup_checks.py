"""Small trainings for the tests of BackupAndRestore, run in worker processes, with a bit of every kind of state."""

import contextlib
import json
import os
import pathlib
import random
import signal
import tempfile
import threading

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from keras_features import small_weights_too, start_anew
from keras_features.models import Noise
from tfdist import compression
from tfdist.backup import between_fits, serialization
from tfdist.callbacks import BackupAndRestore

BATCH, STEPS, EPOCHS = 8, 6, 4  # 24 steps in all
COMPRESSION = {
    "int8": compression.Int8(min_elements=20, block_size=16),
    "powersgd": compression.PowerSGD(2, min_elements=100),  # of the first kernel alone, since compiling takes long
}

# Synchronizations fall between the saves of the tests.
SYNCHRONIZATION = {
    "LocalSGD": tfdist.LocalSGD(every=5),
    "DiLoCo": tfdist.DiLoCo(every=5),
    "streaming": tfdist.DiLoCo(every=5, fragments=2, overlap_steps=2),  # A fragment departs after step 3, one after 5.
}


class BrokenOffError(Exception):
    """Ends a `fit` as an error in the user's code would."""


class BreakOff(keras.callbacks.Callback):
    """Ends the `fit`, or kills the process, after a given step, counted over all `fit` calls."""

    def __init__(self, step, kills):
        super().__init__()
        self._step, self._kills = step, kills
        self.before = 0  # steps counted by former optimizers

    def on_train_batch_end(self, batch, logs=None):
        if keras.ops.convert_to_numpy(self.model.optimizer.iterations) + self.before == self._step:
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise BrokenOffError


class Count(keras.callbacks.Callback):
    """A user's callback with state that every hook changes, a list that the user holds, and a file that it opens."""

    def __init__(self, seen):
        super().__init__()
        self.batches, self.epochs = 0, {}
        self.sums = np.zeros(2)
        self.weight = tf.Variable(0.0)
        self.seen, self.file = seen, None
        self.itself = [self.batches]
        self.itself.append(self.itself)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs[epoch] = self.epochs.get(epoch, 0) + 1
        if self.file is None:
            self.file = open(os.devnull, "w")  # noqa: SIM115

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.sums = np.add(self.sums, [batch, logs["loss"]])
        self.weight.assign_add(batch)
        self.seen.append(batch)
        self.file.write(str(batch))

    def on_train_end(self, logs=None):
        if self.file:  # None after a `fit` that had already finished
            self.file.close()


class TrainFunctionAnew(keras.callbacks.Callback):
    """Makes a new train function in the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if keras.ops.convert_to_numpy(self.model.optimizer.iterations) == STEPS + 1:
            self.model.make_train_function(force=True)


class Evaluate(keras.callbacks.Callback):
    """Evaluates at the end of the first epoch, on a sharding created for this evaluation."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            x, y = data()
            sharding = tfdist.data.BalancedSharding((x[:20], y[:20]), BATCH)
            self.model.evaluate(self.model.distribute_strategy.distribute_datasets_from_function(sharding), verbose=0)


class PerClass(keras.metrics.Metric):
    """A metric with a vector as its value: the number of rows of each class so far."""

    def __init__(self):
        super().__init__(name="per_class")
        self._rows = self.add_weight(shape=(4,), name="rows", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self._rows.assign_add(keras.ops.sum(keras.ops.one_hot(keras.ops.cast(y_true, "int32"), 4), axis=(0, 1)))

    def result(self):
        return self._rows + 0.0


class Rows(keras.utils.PyDataset):
    """The data as a PyDataset. Keras shuffles its batches."""

    def __len__(self):
        return STEPS

    def __getitem__(self, batch):
        return tuple(each[batch * BATCH : (batch + 1) * BATCH] for each in data())


class NoisyRows(Rows):
    """The data with random noise, drawn anew at each reading."""

    def __getitem__(self, batch):
        x, y = super().__getitem__(batch)
        return np.float32(x + np.random.normal(size=x.shape) + random.random()), y


def noisy(x):
    """Adds noise to the rows of a `tf.data` pipeline, as `NoisyRows` does."""
    return tf.ensure_shape(
        tf.numpy_function(lambda x: np.float32(x + np.random.normal(size=x.shape)), [x], "float32"), x.shape
    )


def make_strategy(placement, compressed, sharding=None, group_size=None, synchronization=None):
    """Returns a new strategy at each call, as in a new process, because the state of codecs belongs to a strategy."""
    make = tfdist.MirroredStrategy if placement.startswith("1x") else tfdist.MultiWorkerMirroredStrategy
    return make(
        compression=COMPRESSION.get(compressed),
        model_sharding=sharding,
        shard_group_size=group_size,
        synchronization=SYNCHRONIZATION.get(synchronization),
    )


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS - 3, 9)).astype("float32")  # the last batch is short
    return x, (x @ rng.normal(size=(9, 4))).argmax(1)


def build(
    strategy,
    seed=1,
    width=16,
    optimizer="adam",
    accumulate=None,
    scaled=False,
    steps=1,
    jit=False,
    noise=False,
    vectors=False,
    second=False,
    averages=False,
):
    start_anew(seed)
    if noise:
        keras.random.normal((1,))  # outside the scope: creates a generator that a strategy cannot use
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                layers.Input((9,)),
                layers.Dense(width, activation="tanh"),
                layers.BatchNormalization(),
                Noise() if noise else layers.Dropout(0.2),
                layers.Dense(4),
            ]
        )
        kinds = {kind.__name__.lower(): kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)}
        made = kinds[optimizer]
        optimizer = made(0.01, gradient_accumulation_steps=accumulate, use_ema=averages)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = ["accuracy", *([PerClass()] if vectors else [])]
        model.compile(optimizer, loss, metrics=metrics, steps_per_execution=steps, jit_compile=jit)
    if second:
        model.others = (keras.optimizers.SGD(name="second"),)
    return model


def inputs(kind, strategy):
    """Returns the data arguments of `fit`."""
    x, y = data()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "unshuffled":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if kind.startswith("PyDataset"):
        rows = NoisyRows() if "draws" in kind else Rows()
        return {"x": rows, **({"steps_per_epoch": STEPS // 2} if "shorter" in kind else {})}
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if kind == "dataset":
        return {"x": dataset.shuffle(50, seed=1, reshuffle_each_iteration=False).batch(BATCH)}
    if kind == "draws, endless":
        noise = dataset.repeat().batch(BATCH).map(lambda x, y: (noisy(x), y))
        return {"x": noise, "steps_per_epoch": STEPS // 2}
    if kind == "generator":  # unknown cardinality
        return {"x": dataset.batch(BATCH).filter(lambda *batch: True)}
    if kind == "known":  # one pass over the data lasts two epochs
        return {"x": dataset.batch(BATCH), "steps_per_epoch": STEPS // 2}
    if kind == "endless":
        return {"x": dataset.shuffle(50, seed=1).repeat().batch(BATCH), "steps_per_epoch": STEPS}
    sharding = tfdist.data.BalancedSharding((x, y), BATCH, seed=3, policy="equal")
    shorter = {"steps_per_epoch": STEPS // 2} if kind == "balanced, shorter epochs" else {}
    return {"x": strategy.distribute_datasets_from_function(sharding) if strategy else sharding(), **shorter}


def callbacks_of(directory, position, broken, log, seen, anew=False, evaluates=False, **options):
    mine = [BackupAndRestore(directory, **options)] if directory else []
    count = Count(seen)
    others = [count, *([TrainFunctionAnew()] if anew else []), *([Evaluate()] if evaluates else [])]
    if log:
        others += [
            tfdist.callbacks.CSVLogger(log),
            keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=0.3, factor=0.5),
            keras.callbacks.EarlyStopping(patience=2, min_delta=0.3, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ]
    first, last = (mine, []) if position == "first" else ([], mine)
    return [*first, *others, *last, *broken], count


def train(
    placement,
    directory=None,
    *,
    data_kind="arrays",
    compressed=None,
    sharding=None,
    group_size=None,
    synchronization=None,
    epochs=EPOCHS,
    fits=1,
    break_off=None,
    kills=False,
    position="first",
    monitors=False,
    model=None,
    compiled_anew=False,
    **options,
):
    """Trains until `break_off`, a step or [worker, step]. Returns all state of the training, or None if broken off."""
    strategy = None
    if placement != "plain":
        strategy = make_strategy(placement, compressed, sharding, group_size, synchronization)
    model = build(strategy, **(model or {}))
    worker, step = break_off if isinstance(break_off, list) else (own_index(), break_off)
    broken = [BreakOff(step, kills)] if step is not None and worker == own_index() else []
    histories, counts, between = [], [], []
    # How far a thread has read past the end is not deterministic.
    drawn = (lambda: None) if data_kind == "draws, endless" else lambda: [np.random.random(), random.random()]
    log = pathlib.Path(f"{directory or os.path.join(tempfile.gettempdir(), f'unbroken-{os.getpid()}')}.csv")
    np.random.seed(5)
    x, y = data()
    try:
        for number in range(fits):
            if compiled_anew and number:
                for each in broken:
                    each.before = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
                with strategy.scope() if strategy else contextlib.nullcontext():
                    model.compile(keras.optimizers.Adam(0.02), model.loss, metrics=["accuracy"])
            seen = []
            callbacks, count = callbacks_of(directory, position, broken, monitors and log, seen, **options)
            validation = {"validation_data": (x[:20], y[:20])} if monitors else {}
            history = model.fit(
                **inputs(data_kind, strategy), epochs=epochs, callbacks=callbacks, verbose=0, **validation
            )
            histories.append([history.epoch, {name: np.asarray(log).tolist() for name, log in history.history.items()}])
            between.append([np.asarray(variable).tolist() for variable in model.variables] + [drawn()])
            counts.append([count.batches, count.epochs, count.sums.tolist(), float(count.weight), seen])
        logged = log.read_text() if monitors and own_index() == 0 else None
    except BrokenOffError:
        return None
    finally:
        if not directory:
            log.unlink(missing_ok=True)
    return {
        "log": logged,
        "weights": [np.asarray(variable) for variable in model.variables],
        "optimizer": [np.asarray(variable) for variable in model.optimizer.variables],
        "metrics": {name: np.asarray(value).tolist() for name, value in model.get_metrics_result().items()},
        "histories": histories,
        "between": between,
        "counts": counts,
        "random": drawn(),
        "residual": getattr(strategy, "communication", None) and strategy.communication.residual_norm(),
        "exchanges": getattr(strategy, "communication", None) and strategy.communication.traffic().steps,
    }


def broken_off_and_unbroken(placement, directory, breaks, **options):
    """Returns the results of a training that breaks off at each step of `breaks`, and of one without breaks."""
    for step in breaks:
        assert train(placement, directory, break_off=step, **options) is None
    resumed = train(placement, directory, **options)
    return resumed, unbroken(placement, **options)


def broken_off_in_the_second_fit(directory, **options):
    """As `broken_off_and_unbroken`, but with two fits, and the restart behaves as in a new process."""
    options = {"fits": 2, "epochs": 1, "save_freq": 4, **options}
    assert train("plain", directory, break_off=STEPS + 5, **options) is None
    await_save()
    between_fits.processes.pop(os.path.realpath(directory)).store.release()
    resumed = train("plain", directory, **options)
    return resumed, unbroken("plain", **options)


def skipped_in_later_starts(directory, breaks, **options):
    """Returns the steps of the second `fit` that each start trains, the final weights, and those without breaks.

    Args:
      directory: Directory of the backups.
      breaks: Steps of the model after which starts break off. Later starts skip the first `fit`; the last one finishes.
      options: Options of `BackupAndRestore`.
    """

    def start(*backup, skips=False, break_off=0):
        model, trained = build(None), []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(batch))
        try:
            if not skips:
                model.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[*backup])
            broken = BreakOff(break_off, kills=False)
            model.fit(*data(), batch_size=BATCH, epochs=2, verbose=0, callbacks=[*backup, count, broken])
        except BrokenOffError:
            await_save()
            between_fits.processes.pop(os.path.realpath(directory)).store.release()
        return len(trained), model.get_weights()

    trained = []
    for number, break_off in enumerate([*breaks, 0]):
        backup = BackupAndRestore(directory, save_freq=2, **options)
        steps, weights = start(backup, skips=number > 0, break_off=break_off)
        trained.append(steps)
    return trained, weights, start()[1]


def unbroken(placement, **options):
    return train(placement, **{k: v for k, v in options.items() if k not in ("save_freq", "delete_checkpoint")})


def refused_parts_of_replicas(placement):
    """Whether a backup refuses to read a metric, made in the scope or outside, because all workers would have to."""
    refused, outside = [], keras.metrics.Mean()
    with make_strategy(placement, None).scope():
        inside = keras.metrics.Mean()
    for metric in (inside, outside):
        try:
            serialization.encode(metric, [], ())
            refused.append(False)
        except TypeError:
            refused.append(True)
    return refused


def own_index():
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return config["task"]["index"] if config else 0


def refusals(directory):
    """Returns the error message of each kind of mistake, and whether the backup stayed unchanged."""
    from tfdist.errors import BackupError

    wrong = {
        "nothing": lambda: train("plain", directory, epochs=1, save_freq=2, delete_checkpoint=False),
        "another shape": lambda: train("plain", directory, model={"width": 17}),
        "another optimizer": lambda: train("plain", directory, model={"optimizer": "sgd"}),
        "not writable": lambda: train("plain", "/proc/backup"),
        "optimizer not built": lambda: train("plain", directory, model={"second": True}),
        "twice": lambda: build(None).fit(*data(), callbacks=[BackupAndRestore(directory)] * 2, verbose=0),
    }
    said, before = {}, None
    for name, run in wrong.items():
        between_fits.processes.clear()  # as in another process
        try:
            run()
        except (BackupError, ValueError) as error:
            said[name] = str(error)
        before = before or _tree(directory)
    return said, before == _tree(directory)


def fewer_batches(directory):
    """Returns the errors when epochs have fewer batches than were trained on, and whether the backup is unchanged."""
    from tfdist.errors import BackupError

    train("plain", directory, save_freq=5, break_off=6)
    await_save()
    before, said = _tree(directory), []
    for in_a_list_of_ones_own in (False, True):  # a user's own CallbackList is not told the number of batches
        model = build(None)
        callbacks = [BackupAndRestore(directory)]
        if in_a_list_of_ones_own:
            callbacks = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, epochs=EPOCHS)
        try:
            model.fit(*data(), batch_size=3 * BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)
        except BackupError as error:
            said.append(str(error))
    return said, before == _tree(directory)


def other_data(directory):
    """Returns the error of a `fit` on other global batches than the backup's, and whether model and backup stayed."""
    from tfdist.errors import BackupError

    place = tfdist.MirroredStrategy(["CPU:0"])

    def trains(seed, *others):
        model = build(place)
        x, y = data()
        train_on = place.distribute_datasets_from_function(tfdist.data.BalancedSharding((x, y), BATCH, seed=seed))
        weights = model.get_weights()
        try:
            model.fit(train_on, epochs=EPOCHS, callbacks=[*others, BackupAndRestore(directory, save_freq=1)], verbose=0)
        except BackupError as error:
            return str(error), all(map(np.array_equal, weights, model.get_weights()))

    with contextlib.suppress(BrokenOffError):
        trains(0, BreakOff(3, kills=False))
    await_save()
    before = _tree(directory)
    return *trains(1), before == _tree(directory)


def full_disk(directory):
    """Trains while the system refuses all but tiny files for some steps, so that a save cannot be written."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = []

    class Fill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            step = keras.ops.convert_to_numpy(self.model.optimizer.iterations)
            if step == 7:
                await_save()
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            if step == 11:
                await_save()
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                kept.append(_steps(directory))

    model = build(None)
    backup = BackupAndRestore(directory, save_freq=4, delete_checkpoint=False)
    model.fit(**inputs("arrays", None), epochs=3, callbacks=[backup, Fill()], verbose=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return kept[0], _steps(directory)


def await_save():
    """Waits until the threads of this process that write backups have ended."""
    for thread in threading.enumerate():
        if thread.name == "tfdist-backup":
            thread.join()


def _steps(directory):
    return sorted(int(name.partition("-")[2]) for name in os.listdir(directory) if name.startswith("step-"))


def _tree(directory):
    return {
        path: path.read_bytes() for path in pathlib.Path(directory).rglob("*") if path.is_file() and path.name != "lock"
    }


def saved_with(strategy_kind, directory, compressed, step):
    """Leaves the backup of an interrupted training with other replicas."""
    return train(strategy_kind, directory, compressed=compressed, data_kind="balanced", save_freq=4, break_off=step)


def resumed_with_fewer(directory):
    """Continues a training of 2 replicas with one replica. Returns its epochs, history and optimizer steps."""
    import tfdist.testing

    assert saved_with("1x2", directory, "int8", 9) is None
    alone = tfdist.MirroredStrategy(["CPU:0"])
    model = build(alone)
    rows = inputs("balanced", alone)
    fit = model.fit(**rows, epochs=EPOCHS, callbacks=[BackupAndRestore(directory, save_freq=4)], verbose=0)
    return fit.epoch, fit.history, int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def resumed_with_more(directory):
    """Trains without a strategy, breaks off within an accumulation, and continues with 2 replicas; also unbroken."""
    x, y = data()

    def train_on(strategy, *callbacks):
        start_anew()
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([layers.Input((9,)), layers.Dense(16, activation="tanh"), layers.Dense(4)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4), loss, metrics=["accuracy"])
        fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)
        return [*model.get_weights(), *(np.asarray(fit.history[name]) for name in ("loss", "accuracy"))]

    try:
        train_on(None, BackupAndRestore(directory, save_freq=3), BreakOff(1, kills=False))
    except BrokenOffError:
        return train_on(tfdist.MirroredStrategy(), BackupAndRestore(directory, save_freq=3)), train_on(None)


def resumed_with_other_parts(directory, before, after):
    """Continues a training on a strategy made by the arguments `after`, which it began by `before`; also unbroken."""
    x, y = data()

    def train_on(arguments, *callbacks):
        start_anew()
        with tfdist.MirroredStrategy(**arguments).scope(), small_weights_too():
            model = keras.Sequential([layers.Input((9,)), layers.Dense(15, activation="tanh"), layers.Dense(4)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01, use_ema=True), loss)
        fit = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
        assert len(fit.epoch) == 3
        return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]

    with contextlib.suppress(BrokenOffError):
        train_on(before, BackupAndRestore(directory, save_freq=4), BreakOff(9, kills=False))
    return train_on(after, BackupAndRestore(directory, save_freq=4)), train_on(after)


class _Copies(keras.callbacks.Callback):
    """Records the weights of all replicas before each step, by the number of steps taken."""

    def __init__(self):
        super().__init__()
        self.before = {}

    def on_train_batch_begin(self, batch, logs=None):
        done = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        local = self.model.distribute_strategy.experimental_local_results
        copies = [local(weight.value) for weight in self.model.trainable_weights]
        self.before[done] = [[copy.numpy() for copy in weight] for weight in copies]


def resumed_without_local_steps(directory, synchronization, arguments):
    """Returns the weights before each step of local training, and those of a restart on a strategy by `arguments`."""

    def train_on(strategy, *callbacks):
        recorder = _Copies()
        model = build(strategy)
        with contextlib.suppress(BrokenOffError):
            model.fit(**inputs("unshuffled", strategy), epochs=2, verbose=0, callbacks=[*callbacks, recorder])
        return recorder.before

    backup = BackupAndRestore(directory, save_freq=4)
    local = tfdist.MirroredStrategy(synchronization=synchronization)
    first = train_on(local, backup, BreakOff(5, kills=False))
    await_save()
    return first, train_on(tfdist.MirroredStrategy(**arguments), BackupAndRestore(directory, save_freq=4))
