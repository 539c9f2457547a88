"""Functions that the tests of the row comparison run in worker processes."""

import json
import os
import random
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import layers

from keras_features import strategy_of as strategy

ROWS, BATCH = 48, 8
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.arange(ROWS, dtype="float32")[:, None]


class Batches(keras.utils.PyDataset):
    """Batches of the rows, in an order that `random` draws."""

    def __init__(self, random=np.random):
        super().__init__()
        self.order = random.permutation(ROWS)

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, batch):
        rows = self.order[BATCH * batch :][:BATCH]
        return X[rows], Y[rows]


def generated(first=0, by=1, noise=0.0, endless=False):
    own = np.random.default_rng()
    while True:
        for row in range(first, ROWS, BATCH * by):
            x = X[row : row + BATCH]
            yield (x + noise * own.normal(size=x.shape)).astype("float32"), Y[row : row + BATCH]
        if not endless:
            return


def from_files(seed, folder):
    return keras.utils.image_dataset_from_directory(
        folder, image_size=(2, 2), batch_size=BATCH, seed=seed, verbose=False
    )


def _sliced(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


class _Stop(keras.callbacks.Callback):
    """Ends an evaluation at its second batch. One worker waits before, so that it reads ahead."""

    runs_on_all_workers = True

    def __init__(self, worker):
        super().__init__()
        self._seconds = 2 * worker

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(self._seconds)
        self.model.stop_evaluating = batch == 1


def _ending_early(worker):
    def batches():
        yield from ((X[row:][:BATCH], Y[row:][:BATCH]) for row in range(0, ROWS - BATCH * worker, BATCH))

    signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=signature)}


def _in_another_order_from_the_third_pass(worker):
    passes = []

    def rows():
        passes.append(1)
        order = np.random.default_rng(worker if len(passes) > 2 else 0).permutation(ROWS)
        yield from ((X[order[row:][:BATCH]], Y[order[row:][:BATCH]]) for row in range(0, ROWS, BATCH))

    signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    return {"x": tf.data.Dataset.from_generator(rows, output_signature=signature), "epochs": 4}


def _noisy(x, y):
    return x + tf.random.normal([4]), y


# Name: the arguments that a worker passes to a method of the model.
CASES = {
    "a part of the arrays": lambda worker: {"x": X[worker::2], "y": Y[worker::2], "batch_size": BATCH},
    "arrays in another order": lambda worker: {
        "x": X[:: 1 - 2 * worker],
        "y": Y[:: 1 - 2 * worker],
        "batch_size": BATCH,
    },
    "fewer rows": lambda worker: {"x": X[worker:], "y": Y[worker:], "batch_size": BATCH},
    "a shard": lambda worker: {"x": _sliced().shard(2, worker).batch(BATCH)},
    "fewer rows in a pipeline": lambda worker: {"x": _sliced().take(ROWS - worker).batch(BATCH)},
    "another seed": lambda worker: {"x": _sliced().shuffle(ROWS, seed=worker).batch(BATCH)},
    "an own generator of numbers": lambda worker: {"x": Batches(np.random.default_rng())},
    "a part of a generator": lambda worker: {"x": generated(BATCH * worker, 2)},
    "another width": lambda worker: {"x": np.pad(X, ((0, 0), (0, worker))), "y": Y, "batch_size": BATCH},
    "an early end": _ending_early,
    "a callback that stops": lambda worker: {**_ending_early(0), "callbacks": [_Stop(worker)]},
    "from the third pass on": _in_another_order_from_the_third_pass,
    "a part of endless data": lambda worker: {
        "x": generated(BATCH * worker, 2, endless=True),
        "steps_per_epoch": 2,
    },
    "another learning rate from the second epoch on": lambda worker: {
        "x": X,
        "y": Y,
        "epochs": 3,
        "callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 * (2 if worker and epoch else 1))],
    },
    "NumPy's random numbers": lambda worker: {"x": Batches(), "epochs": 2},
    "arrays": lambda worker: {"x": X, "y": Y, "batch_size": BATCH, "epochs": 2, "validation_data": (X, Y)},
    "shuffled": lambda worker: {"x": _sliced().shuffle(ROWS).batch(BATCH), "epochs": 2},
    "augmented by TensorFlow": lambda worker: {
        "x": _sliced().map(_noisy, num_parallel_calls=2).batch(BATCH),
        "epochs": 2,
    },
    "augmented in Python": lambda worker: {"x": generated(noise=1.0)},
    "rounded in another way": lambda worker: {"x": X * (1 + 1e-6 * worker), "y": Y, "batch_size": BATCH, "epochs": 2},
}


def outcome_in_a_new_program(case):
    """Returns `outcome(case)` as in a process in which nobody has set a seed and no strategy exists yet."""
    random.seed()
    np.random.set_bit_generator(np.random.MT19937())  # `np.random.seed()` would count as a seed that the user set.
    tf.random.set_seed(None)
    strategy.cache_clear()
    return outcome(case)


def outcome(case, method="fit"):
    """Returns this worker's error in a case, or "nothing" and warnings of unlike rows; and whether weights moved."""
    with strategy("2x1").scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    given, said = CASES[case](_worker()), []
    if method == "predict":
        given.pop("y", None)
    before = [weight.numpy() for weight in model.weights]
    with mock.patch.object(logging, "warning", lambda text, *values: said.append(text % values)):
        try:
            getattr(model, method)(verbose=0, **given)
        except Exception as error:
            moved = any((weight.numpy() != old).any() for weight, old in zip(model.weights, before, strict=True))
            return type(error).__name__, str(error), moved
    return "nothing", "".join(text for text in said if "different rows" in text), True


def reads_a_file_that_one_worker_lacks(folder):
    """Trains on a file. Worker 1 has no such file, so that its data fails before the first batch."""
    path = os.path.join(folder, "other" if _worker() else "file")
    with strategy("2x1").scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    dataset = _sliced().map(lambda x, y: (x + tf.cast(tf.strings.length(tf.io.read_file(path)), tf.float32), y))
    model.fit(dataset.batch(BATCH), verbose=0)


def outcome_of_directory(folder):
    """Returns the numbers of the files in this worker's first batch, from a folder that is read without a seed."""
    dataset = from_files(None, folder)
    return [float(value) for x, _ in dataset.take(1) for value in x[:, 0, 0, 0]]


def outcome_of_loop(is_mistaken):
    """Returns the error of a worker that also shards a distributed dataset by itself, and the number of rows it saw."""
    place, seen = strategy("2x1"), 0
    dataset = _sliced().shard(2, _worker()) if is_mistaken else _sliced()
    try:
        for x, _ in place.experimental_distribute_dataset(dataset.batch(BATCH)):
            seen += sum(len(part) for part in place.experimental_local_results(x))
    except Exception as error:
        return str(error), seen
    return "", seen


def _worker():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def outcome_of_model(case, method):
    """Returns the error when worker 1 differs in one property of its model or of `compile`."""
    second = bool(_worker())
    activation = "tanh" if second and case == "activation" else "relu"
    optimizer = {
        "optimizer": keras.optimizers.SGD if second else keras.optimizers.Adam,
        "learning rate": lambda: keras.optimizers.SGD(0.2 if second else 0.1),
        "momentum": lambda: keras.optimizers.SGD(momentum=0.2 if second else 0.1),
    }.get(case, keras.optimizers.SGD)
    options = {
        "loss": {"loss": "mae" if second else "mse"},
        "metrics": {"loss": "mse", "metrics": ["mae", "mse"] if second else ["mae"]},
        "steps per execution": {"loss": "mse", "steps_per_execution": 1 + second},
    }.get(case, {"loss": "mse"})
    with strategy("2x1").scope():
        dropout = layers.Dropout(0.2 if second and case == "rate" else 0.1)
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation), dropout, layers.Dense(1)])
        model.compile(optimizer(), **options)
    return _message(lambda: getattr(model, method)(*([X] if method == "predict" else [X, Y])))


def outcome_of_variables(case):
    """Returns the error when workers create different variables. Collectives of this process fail afterwards."""
    second = bool(_worker())

    def make():
        with strategy("2x1").scope():
            more = [layers.BatchNormalization()] if second and case == "one layer more" else []
            width = 4 + (second and case == "width")
            keras.Sequential([layers.Input((width,)), layers.Dense(3), *more, layers.Dense(1)])

    return _message(make)


def _message(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
