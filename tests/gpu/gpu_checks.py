"""Functions that the tests on GPUs run in worker processes."""

import functools
import gc
import os
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.models import keras_model
from tfdist import compression
from tfdist.strategies.sharding.sharded_weight import is_sharded_weight

KIND = os.environ.get("TFDIST_GPU_TESTS_ON", "GPU")
BATCH, STEPS = 32, 6
SMALL = {"min_elements": 64}
CODECS = {
    "float16": compression.Float16(error_feedback=True, **SMALL),
    "bfloat16": compression.BFloat16(error_feedback=True, **SMALL),
    "int8": compression.Int8(**SMALL),
    "int4": compression.Int4(**SMALL),
    "sign": compression.Sign(**SMALL),
    "topk": compression.TopK(0.05, **SMALL),
    "topk_momentum": compression.TopK(0.05, momentum=0.9, **SMALL),
    "powersgd": compression.PowerSGD(2, **SMALL),
}
LOCAL_STEPS = {
    "LocalSGD": lambda: tfdist.LocalSGD(every=4),
    "DiLoCo": lambda: tfdist.DiLoCo(every=4),
    # Fragments depart after steps 2 and 4, and arrive two steps later, in epochs of 6 steps.
    "streaming DiLoCo": lambda: tfdist.DiLoCo(every=4, fragments=2, overlap_steps=2),
    "LocalSGD of each step": lambda: tfdist.LocalSGD(every=1),
    "DiLoCo of each step": lambda: tfdist.DiLoCo(every=1, outer_optimizer=keras.optimizers.SGD(1.0)),
}


def devices():
    """Returns the names of this process's logical devices, such as ["GPU:0", "GPU:1"]."""
    return [f"{KIND}:{number}" for number in range(len(tf.config.list_logical_devices(KIND)))]


def strategy(placement, codec=None, hierarchical=False, sharding=None, local_steps=None):
    """Returns the strategy of these arguments, the same at each call."""
    return _strategy(placement, codec, hierarchical, sharding, local_steps)


@functools.cache
def _strategy(placement, codec, hierarchical, sharding, local_steps):
    """Makes a strategy once in this process.

    Args:
      placement: "plain" for no strategy, "mirrored" for the devices of this process, or "workers".
      codec: Name of a codec, or `None`.
      hierarchical: Whether the devices of a process reduce by hierarchical copies.
      sharding: The `model_sharding` of the strategy.
      local_steps: Name of the `synchronization` of the strategy, or `None`.
    """
    if placement == "plain":
        return None
    kwargs = {"compression": CODECS[codec] if codec else None, "model_sharding": sharding}
    kwargs["synchronization"] = LOCAL_STEPS[local_steps]() if local_steps else None
    if placement == "mirrored":
        ops = tf.distribute.HierarchicalCopyAllReduce() if hierarchical else None
        return tfdist.MirroredStrategy(devices(), ops, **kwargs)
    # Two processes share one GPU, which NCCL refuses.
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tfdist.MultiWorkerMirroredStrategy(communication_options=options, **kwargs)


def rows(batches=STEPS):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(BATCH * batches, 12, 12, 3)).astype("float32")
    return images, (images.mean((1, 2)) @ rng.normal(size=(3, 4))).argmax(1)


def build(placement, policy="float32", optimizer="sgd", dense=False, compiled=None, **options):
    """Makes a small CNN whose batch normalization counts the rows of all replicas; `dense` leaves out convolutions."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy(policy)
    place = strategy(placement, **options)
    try:
        with tf.device(f"{KIND}:0") if place is None else place.scope():
            normalized = layers.BatchNormalization(synchronized=place is not None and place.num_replicas_in_sync > 1)
            convolved = [layers.Conv2D(8, 3, activation="relu"), normalized, layers.Conv2D(16, 3, activation="tanh")]
            model = keras.Sequential(
                [
                    layers.Input((12, 12, 3)),
                    *([normalized] if dense else convolved),
                    layers.Flatten(),
                    layers.Dense(24, activation="tanh"),
                    layers.Dense(4, dtype="float32"),
                ]
            )
            rule = keras.optimizers.Adam(0.01) if optimizer == "adam" else keras.optimizers.SGD(0.05, momentum=0.9)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(rule, loss, metrics=["accuracy"], **{"jit_compile": False, **(compiled or {})})
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return model


def train(placement, epochs=2, **options):
    """Trains the CNN. Returns its weights, the history, the loss scale if there is one, and whether replicas agree."""
    model = build(placement, **options)
    history = model.fit(*rows(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
    loss, accuracy = model.evaluate(*rows(), batch_size=BATCH, verbose=0)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return {
        "weights": model.get_weights(),
        "history": history,
        "evaluated": [loss, accuracy],
        "predicted": model.predict(rows()[0], batch_size=BATCH, verbose=0),
        "scale": None if scale is None else float(scale),
        "replicas_agree": placement == "plain" or _replicas_agree(model),
    }


def _replicas_agree(model):
    whole = [variable.value for variable in model.trainable_variables if not is_sharded_weight(variable)]
    copies = [model.distribute_strategy.experimental_local_results(value) for value in whole]
    return all(np.array_equal(copy.numpy(), one[0].numpy()) for one in copies for copy in one[1:])


def overflow(placement):
    """Trains in float16 on a batch whose gradients overflow.

    Returns:
      The loss scale before and after that batch, and whether the batch left the trainable weights as they were.
    """
    model = build(placement, policy="mixed_float16")
    images, labels = rows(1)
    model.train_on_batch(images, labels)
    before, kept = float(model.optimizer.dynamic_scale), _trainable(model)
    model.train_on_batch(np.full_like(images, 6e4), labels)
    is_kept = all(map(np.array_equal, kept, _trainable(model)))
    return before, float(model.optimizer.dynamic_scale), is_kept


def _trainable(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def coded(name, mode, device):
    """Compresses rows with a residual on a device.

    Returns:
      The words, the decoded rows, the new state, and the sum of gradient and old residual.
    """
    codec = CODECS[name]
    elements = 16 * codec.granule if hasattr(codec, "granule") else 4096
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, elements)).astype(np.float32)
    values[1] *= 1e-6
    values[2, rng.random(elements) < 0.9] = 0
    states = [tf.constant(rng.standard_normal((3, elements)).astype(np.float32) * 0.1) for _ in range(codec.states)]

    def traced(fn):
        return fn if mode == "eager" else tf.function(fn, autograph=False, jit_compile=mode == "compiled")

    with tf.device(device):
        words, state = traced(codec.compress)(tf.constant(values), tuple(states))
        decoded = traced(lambda words: codec.decode(words, elements))(words)
    intended = values + (states[0].numpy() if states else 0)
    return words.numpy(), decoded.numpy(), [each.numpy() for each in state], intended


def codec_differences(name, mode):
    """Compares a codec on the GPU with the codec on the CPU.

    Returns:
      The share of words that differ; the largest difference of the decoded rows; what decoded rows and residual lack of
      the sum that was encoded, on the GPU and on the CPU, if the codec has no other state; and the largest residual on
      the CPU. All values are relative to the largest value of their row.
    """
    places = [coded(name, mode, f"{KIND}:0"), coded(name, "graph", "CPU:0")]
    (own_words, own, *_), (words, decoded, *_) = places
    (_, _, residuals, intended) = places[1]
    largest = np.max(np.abs(intended), axis=-1, keepdims=True)
    lost = [np.max(np.abs(row + rest[0] - whole) / largest) for _, row, rest, whole in places if len(rest) == 1]
    return {
        "words": float(np.mean(own_words != words)),
        "decoded": float(np.max(np.abs(own - decoded) / np.max(np.abs(decoded), axis=-1, keepdims=True))),
        "lost": [float(each) for each in lost],
        "residual": float(np.max(np.abs(residuals[-1]) / largest)),
    }


class Products(layers.Layer):
    """Multiplies matrices until the device has worked for a while, after the input has arrived."""

    def __init__(self, size, times):
        super().__init__()
        self.size, self.times = size, times

    def build(self, shape):
        self.matrix = self.add_weight(shape=(self.size, self.size), initializer="glorot_uniform")

    def call(self, x):
        value = self.matrix * (1 + 1e-9 * tf.reduce_mean(x))
        for _ in range(self.times):
            value = tf.matmul(value, self.matrix)
        return x + tf.reduce_sum(value, axis=0)[: x.shape[-1]]


def busy_seconds(size, times):
    """Times the products of the layer `Products` and their gradients on this process's first device."""
    with tf.device(devices()[0]):
        matrix = tf.random.normal([size, size], stddev=size**-0.5)

        @tf.function
        def work(matrix):
            with tf.GradientTape() as tape:
                tape.watch(matrix)
                value = matrix
                for _ in range(times):
                    value = tf.matmul(value, matrix)
            return tape.gradient(value, matrix)

        seconds = []
        for _ in range(4):
            start = time.monotonic()
            work(matrix)[0, 0].numpy()  # Waits for the device.
            seconds.append(time.monotonic() - start)
    return min(seconds)


def timed_steps(placement, size, times, steps=6):
    """Trains a model that keeps the device busy.

    Returns:
      The seconds that steps report, `busy_seconds`, and the moments that the clock of the first replica noted.
    """
    place = strategy(placement)
    busy = busy_seconds(size, times)
    keras.utils.set_random_seed(1)
    with place.scope():
        model = keras.Sequential([layers.Input((8,)), Products(size, times), layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=False)
    reported, moments = [], []

    def listen(report):
        reported.append(report.compute_seconds.tolist())
        moments.append(place.reports.clock(0).times.numpy().tolist())

    place.reports.listeners.append(listen)
    model.fit(np.ones((8 * steps, 8)), np.ones((8 * steps, 4)), batch_size=8, verbose=0)
    place.reports.listeners.remove(listen)
    return reported[1:], min(busy, busy_seconds(size, times)), moments  # Other work on the card may come and go.


class BrokenOffError(Exception):
    """Ends a `fit` as an error in the user's code would."""


def resumed():
    """Trains twice: at once, and with an error after an epoch and BackupAndRestore. Returns both results' weights."""

    class BreakOff(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise BrokenOffError

    def fit(*callbacks):
        model = build("mirrored", optimizer="adam")
        model.fit(*rows(), batch_size=BATCH, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    whole = fit()
    with tempfile.TemporaryDirectory() as folder:
        try:
            fit(tfdist.callbacks.BackupAndRestore(folder), BreakOff())
        except BrokenOffError:
            return whole, fit(tfdist.callbacks.BackupAndRestore(folder))
    raise AssertionError("the first training did not break off")


def balanced(placement):
    """Trains on a BalancedSharding, which divides rows by the reported speed. Returns weights and rows by replica."""
    place = strategy(placement)
    model = build(placement)
    images, labels = rows()
    data = tfdist.data.BalancedSharding((images, labels), global_batch_size=BATCH, shuffle=False)
    seen = []

    def listen(report):
        seen.append(report.rows.tolist())

    place.reports.listeners.append(listen)
    model.fit(place.distribute_datasets_from_function(data), epochs=2, verbose=0)
    place.reports.listeners.remove(listen)
    return model.get_weights(), seen


def table_training(placement):
    """Trains on a table of 1000 rows, divided among replicas or on one device. Returns the weights and the losses."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    place = strategy(placement)
    table = layers.Embedding if place is None else tfdist.layers.ShardedEmbedding
    with tf.device(f"{KIND}:0") if place is None else place.scope():
        model = keras.Sequential(
            [layers.Input((5,), dtype="int64"), table(1000, 16), layers.Flatten(), layers.Dense(4)]
        )
        model.compile(keras.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(1000, size=(BATCH * STEPS, 5)), rng.normal(size=(BATCH * STEPS, 4))
    losses = model.fit(ids, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    return model.get_weights(), losses


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-4),
    "adamw": lambda: keras.optimizers.AdamW(1e-4),
    "sgd": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
    "lion": lambda: keras.optimizers.Lion(1e-4),
}


def memory(name, optimizer, sharding):
    """Measures the memory of a model of the benchmarks on each device of this process.

    Returns:
      Bytes that the allocator of each device holds for the weights, and for the optimizer's state.
    """
    keras.utils.clear_session()
    gc.collect()

    def held():
        for device in devices():
            with tf.device(device):
                tf.zeros([1]).numpy()  # Waits for work on this device.
        return np.array([tf.config.experimental.get_memory_info(device)["current"] for device in devices()])

    start = held()
    with strategy("mirrored", sharding=sharding).scope():
        model = keras_model(name, keras)
        built = held()
        rule = OPTIMIZERS[optimizer]()
        rule.build(model.trainable_variables)
        return (built - start).tolist(), (held() - built).tolist()
