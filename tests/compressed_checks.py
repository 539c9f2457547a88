"""Functions that the tests of compressed training run in worker processes."""

import functools
import gc
import logging
import re
import time

import keras
import numpy as np
import tensorflow as tf
from absl import logging as absl_logging
from keras import layers

import tfdist
from keras_features import outcome, start_anew, strategy_of
from tfdist import compression

# Options for small models: every tensor with more than one row is compressed.
CODECS = {
    "float16": compression.Float16(min_elements=20, block_size=32),
    "bfloat16": compression.BFloat16(min_elements=20),
    "int8": compression.Int8(min_elements=20, block_size=16),
    "int4": compression.Int4(min_elements=20, block_size=16),
    "sign": compression.Sign(min_elements=20, block_size=32),
    "topk": compression.TopK(0.2, min_elements=20),
    "topk_momentum": compression.TopK(0.2, momentum=0.5, min_elements=20),
    "powersgd": compression.PowerSGD(2, min_elements=20),
    "late": compression.Int8(min_elements=20, block_size=16, start_step=3),
}
# Codecs of one training: each kernel of the model uses another codec.
MIXTURES = {
    "words": (CODECS["int8"], CODECS["float16"], CODECS["sign"], CODECS["bfloat16"]),
    "others": (CODECS["topk"], CODECS["powersgd"], CODECS["topk_momentum"], CODECS["int4"]),
}
MODES = {
    "plain": {},
    "steps_per_execution": {"steps_per_execution": 4},
    "accumulation": {"accumulate": 2},
    "mixed_float16": {"policy": "mixed_float16"},
    "mixed_bfloat16": {"policy": "mixed_bfloat16"},
    "eager": {"run_eagerly": True},
    "functions_eagerly": {},
}
BATCH = 12
# Widths of the hidden layers: a kernel for each codec of a mixture, and a model that is traced in a third of the time.
WIDTHS, FEW = (33, 20, 17), (33,)


def data(rows=BATCH * 10):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 9)).astype("float32")
    return x, (x @ rng.normal(size=(9, 4))).argmax(1)


def build(strategy, accumulate=None, policy="float32", widths=WIDTHS, **compile_options):
    start_anew()
    keras.mixed_precision.set_global_policy(policy)
    try:
        with strategy.scope():
            model = keras.Sequential(
                [
                    layers.Input((9,)),
                    *(layers.Dense(width, activation="tanh") for width in widths),
                    layers.Dense(4),
                ]
            )
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=accumulate),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                **compile_options,
            )
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return model


@functools.cache
def policy(name):
    """Returns the named codec, or a policy that gives each kernel the next codec of a mixture."""
    if name in CODECS:
        return CODECS[name]

    def codec_of(shape, dtype, path):
        kernel = re.fullmatch(r"sequential/dense_?(\d*)/kernel", path)
        return kernel and MIXTURES[name][int(kernel[1] or 0)]

    return codec_of


def train(placement, codec, mode="plain", epochs=5, **options):
    """Trains, for 50 steps by default. Returns weights, whether all replicas hold the same bits, and bytes sent."""
    strategy = strategy_of(placement, policy(codec), **options)
    model = build(strategy, widths=WIDTHS if codec in MIXTURES else FEW, **MODES[mode])
    x, y = data()
    tf.config.run_functions_eagerly(mode == "functions_eagerly")
    try:
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False).history
    finally:
        tf.config.run_functions_eagerly(False)
    traffic = strategy.communication.traffic()
    assert traffic.encode_seconds is None, "times are measured on request only"
    return outcome(model, history) | {"sent_bytes": traffic.sent_bytes, "raw_bytes": traffic.raw_bytes}


def unbroken_and_resumed(placement, codec, folder):
    """Returns weights after 4 epochs, and after the last two of them with a restart before them."""
    x, y = data()
    results, path = [], None
    for epochs in ([2, 2], [2]):
        # A new strategy, so that its state comes from the checkpoint only.
        strategy_of.cache_clear()
        strategy = strategy_of(placement, policy(codec))
        worker = 0 if placement.startswith("1x") else strategy.cluster_resolver.task_id
        model = build(strategy)
        whole = tf.train.Checkpoint(model=model, communication=strategy.communication)
        if path:
            whole.read(path).expect_partial()
        for part in epochs:
            model.fit(x, y, batch_size=BATCH, epochs=part, verbose=0, shuffle=False)
            path = path or whole.write(f"{folder}/state-{worker}")
        results.append(model.get_weights())
    return results


def handed_on(codec):
    """Returns states of three replicas, of one replica that takes them over, and of two that take over its states.

    Each takes a step in a loop of its own, which is traced sooner than `fit`.
    """
    states = []
    for devices in (3, 1, 2):
        strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(devices)], compression=policy(codec))
        start_anew()
        with strategy.scope():
            layer, optimizer = layers.Dense(33), keras.optimizers.SGD(0.1)
            layer.build((None, 9))
            optimizer.build(layer.trainable_variables)
        given = [tf.random.stateless_normal(each.shape, [1, 2]) for each in layer.trainable_variables]
        if states:
            strategy.communication.redistribute(states[-1:])
            states.append(strategy.communication.state())
        apply = functools.partial(optimizer.apply, given, layer.trainable_variables)
        tf.function(functools.partial(strategy.run, apply))()
        if devices == 2:  # The first step has created the exchange, so that the exchange can now take the states.
            strategy.communication.redistribute(states[-1:])
        states.append(strategy.communication.state())
    return states


def residuals_of_a_later_phase(folder):
    """Returns residual norms and counts after two steps with a second optimizer, without and with a restart between."""
    x, y = data(BATCH)
    kept = []
    for phases in ([False, True], [True]):
        strategy_of.cache_clear()
        strategy = strategy_of("1x2", policy("int8"))
        model = build(strategy, widths=WIDTHS[:2])
        whole = tf.train.Checkpoint(communication=strategy.communication)
        if kept:
            whole.read(f"{folder}/state").expect_partial()
        for trains_all in phases:
            for layer in model.layers[:2]:
                layer.trainable = trains_all
            with strategy.scope():
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.SGD(0.0), loss)
            model.fit(x, y, batch_size=BATCH, verbose=0)
        if not kept:
            whole.write(f"{folder}/state")
            model.fit(x, y, batch_size=BATCH, verbose=0)
        counts = strategy.communication.exchanges[-1].counts
        kept.append((strategy.communication.residual_norm(), [count.numpy().tolist() for count in counts]))
    return kept


def exchanged(placement, codec, gradients, factors, **options):
    """Exchanges `gradients`, a list per replica, by an optimizer. Returns the sums and the codec states of each step.

    The optimizer has a momentum, which a strategy can shard, but which adds nothing to float32 gradients. Each step
    multiplies the gradients by the next of `factors`. A factor of NaN means 1, and puts a NaN into one element on the
    last replica.
    """
    strategy = strategy_of(placement, CODECS[codec], **options)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(g.shape)) for g in gradients[0]]
        optimizer = keras.optimizers.SGD(1.0, momentum=1e-30)
        optimizer.build(variables)
    view = strategy.distributed_optimizer(optimizer)
    everyone = [tf.stack(same) for same in zip(*gradients, strict=True)]

    @tf.function
    def step(factor):
        poisoned = tf.math.is_nan(factor)
        scale = tf.where(poisoned, 1.0, factor)

        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = [whole[replica] * scale for whole in everyone]
            bad = tf.logical_and(replica == strategy.num_replicas_in_sync - 1, poisoned)
            own[0] = tf.where(bad, tf.tensor_scatter_nd_update(own[0], [[0] * own[0].shape.rank], [factor]), own[0])
            view.apply(own, variables)

        strategy.run(on_replica)

    norms, moved = [], []
    for factor in factors:
        with strategy.scope():
            for variable in [*variables, *optimizer.variables[2:]]:
                variable.assign(tf.zeros(variable.shape))
        step(tf.constant(factor, tf.float32))
        norms.append([state.numpy() for states in strategy.communication.exchanges[-1].states for state in states])
        moved.append([[-copy.numpy() for copy in variable.values] for variable in variables])
    return moved, norms


def refusal_of(call):
    """Returns the class and message of the error that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def warnings_of(codec, make_optimizer, kind="dense", synchronization=None):
    """Returns the messages logged in the first training step of a model."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    absl_logging.get_absl_logger().addHandler(handler)
    strategy = tfdist.MirroredStrategy(compression=codec, synchronization=synchronization)
    keras.mixed_precision.set_global_policy("float64" if kind == "double" else "float32")
    try:
        with strategy.scope():
            first = layers.Embedding(50, 33) if kind == "rows" else layers.Dense(33)
            model = keras.Sequential([layers.Input((9,)), first, layers.Flatten()])
            model.compile(make_optimizer(), "mse")
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.train_on_batch(np.zeros([4, 9]), np.zeros([4, 9 * 33 if kind == "rows" else 33]))
    absl_logging.get_absl_logger().removeHandler(handler)
    return messages


def alike_on_all(placement, compressed):
    """Returns sums of an eager step in which all replicas pass the same object to an optimizer and to `all_reduce`.

    Also returns the number of replicas, the sum of a tensor outside of steps, and the number of workers.
    """
    strategy = strategy_of(placement, CODECS["float16"] if compressed else None)
    given, number = tf.ones([40, 30]), tf.constant(3.0)
    rows = tf.IndexedSlices(tf.ones([2, 30]), tf.constant([1, 2]), tf.constant([40, 30]))
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([40, 30])) for _ in range(3)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    def step():
        own = given * 1.0  # a separate object on each replica
        optimizer.apply([given, own, rows], variables)
        return tf.distribute.get_replica_context().all_reduce("SUM", number)

    total = strategy.experimental_local_results(strategy.run(step))[0]
    moved = [-copy.numpy() for variable in variables for copy in variable.values]
    with strategy.scope():
        (of_workers,) = strategy.extended.batch_reduce_to("SUM", [(number, number)])
    of_workers = float(strategy.experimental_local_results(of_workers)[0])
    replicas = strategy.num_replicas_in_sync
    workers = replicas // len(strategy.extended.worker_devices)
    return [float(array[1, 1]) for array in moved], float(total), replicas, of_workers, workers


class OptingOut(keras.Sequential):
    def train_step(self, data):
        with compression.uncompressed():
            return super().train_step(data)


def opt_outs_that_would_do_nothing():
    """Returns errors of `uncompressed` around `run`, `train_on_batch`, `scope`, `fit`; in a step without a strategy."""
    strategy = strategy_of("1x2", CODECS["int8"])
    model = build(strategy, widths=FEW)
    x, y = data(BATCH)

    def around(call):
        with compression.uncompressed():
            call()

    def in_scope():
        with strategy.scope():
            around(lambda: None)

    calls = (lambda: around(lambda: strategy.run(lambda: 1)), lambda: around(lambda: model.train_on_batch(x, y)))
    again = lambda: around(lambda: model.fit(x, y, verbose=0))  # noqa: E731
    said = [*(refusal_of(call) for call in calls), refusal_of(in_scope)]
    model.train_on_batch(x, y)
    plain = OptingOut([layers.Dense(4)])
    plain.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return [*said, refusal_of(again)], refusal_of(lambda: plain.train_on_batch(x, y))


def mistakes_of_a_first_step(mistake):
    """Returns the error that the first step raises for a mistake that cannot be found earlier."""
    policies = {"kind": lambda *gradient: 8, "name": lambda *gradient: "int9", "auto": lambda *_: "auto"}
    strategy = tfdist.MirroredStrategy(compression=policies.get(mistake, CODECS["int8"]))
    dtype = tf.bool if mistake == "truths" else tf.float32
    with strategy.scope():
        variable = tf.Variable(tf.zeros([40, 30], dtype))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    return refusal_of(lambda: strategy.run(lambda: optimizer.apply([tf.ones([40, 30], dtype)], [variable])))


def sent_under_named_codecs():
    """Returns the compression ratio of a policy that returns names of codecs."""
    strategy = tfdist.MirroredStrategy(compression=lambda shape, *_: "powersgd(1)" if shape.rank == 2 else None)
    build(strategy, widths=FEW).train_on_batch(*data(BATCH))
    return strategy.communication.traffic().ratio


def paths_given_to_a_policy(placement):
    """Returns the paths that a policy gets of a model in `fit`, of another in a custom loop, and of a `tf.Variable`."""
    paths, results = [], []
    strategy = strategy_of(placement, lambda shape, dtype, path: paths.append(path))
    start_anew()
    with strategy.scope():
        first, second = (
            keras.Sequential(
                [layers.Input((5,)), layers.Embedding(50, 8, name="words"), layers.Flatten(), layers.Dense(3)]
            )
            for _ in range(2)
        )
        first.compile("adam", "mse")
        optimizers = [keras.optimizers.SGD(), keras.optimizers.SGD()]
        weight = tf.Variable(tf.ones([40, 30]), name="weight")
        optimizers[0].build(second.trainable_variables)
        optimizers[1].build([weight])
    first.fit(np.ones((BATCH, 5)), np.ones((BATCH, 3)), batch_size=BATCH, verbose=0)
    results.append(sorted(set(paths)))
    for optimizer, variables in zip(optimizers, (second.trainable_variables, [weight]), strict=True):
        paths.clear()
        gradients = [tf.ones(variable.shape) for variable in variables]
        strategy.run(tf.function(functools.partial(optimizer.apply, gradients, variables)))
        results.append(sorted(set(paths)))
    return results


def refusal_of_unlike_choices():
    """Returns the error of `fit` if layers have other names on worker 1, so that the policy chooses other codecs."""
    policy = lambda shape, dtype, path: "int8" if "dense_1" in path else None  # noqa: E731
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=policy)
    start_anew()
    with strategy.scope():
        for _ in range(strategy.cluster_resolver.task_id):
            layers.Dense(1)
        model = keras.Sequential([layers.Input((9,)), layers.Dense(3)])
        model.compile("sgd", "mse")
    return refusal_of(lambda: model.fit(np.ones((BATCH, 9)), np.ones((BATCH, 3)), batch_size=BATCH, verbose=0))


def residuals_of_the_second_of_two_models(folder, collected):
    """Returns states of the second of two equal models, the same after a restart, and states of the first model."""
    x, y = data(BATCH)
    strategy = tfdist.MirroredStrategy(compression=CODECS["int8"])
    gc.disable()
    try:
        norms = []
        for steps in (3, 1):
            model = build(strategy, widths=FEW)
            for _ in range(steps):
                model.train_on_batch(x, y)
            norms.append({name: array.copy() for name, array in strategy.communication.state().items()})
            keras.backend.clear_session()
        if collected:
            gc.collect()
        path = tf.train.Checkpoint(model=model, communication=strategy.communication).write(f"{folder}/state")
        left = strategy.communication.state()
    finally:
        gc.enable()
    strategy = tfdist.MirroredStrategy(compression=CODECS["int8"])
    model = build(strategy, widths=FEW)
    tf.train.Checkpoint(model=model, communication=strategy.communication).read(path).expect_partial()
    model.train_on_batch(x * np.nan, y)  # A step with NaN does not change the states.
    return left, strategy.communication.state(), norms[0]


def restored_on_other_replicas(codec, folder):
    """Returns errors of a checkpoint of 3 replicas, restored on 2 before and after a step, and with another codec."""
    x, y = data(BATCH)
    said, path = [], None
    for devices, named, early in ((3, codec, None), (2, codec, True), (2, codec, False), (3, "bfloat16", True)):
        strategy = tfdist.MirroredStrategy([f"CPU:{i}" for i in range(devices)], compression=policy(named))
        model = build(strategy, widths=FEW)
        whole = tf.train.Checkpoint(communication=strategy.communication)
        if path is None:
            model.train_on_batch(x, y)
            path = whole.write(f"{folder}/state")
        elif early:
            whole.read(path)
            for _ in range(2):
                model.make_train_function(force=True)  # A function that failed to trace cannot run again.
                said.append(refusal_of(lambda model=model: model.train_on_batch(x, y)))
        else:
            model.train_on_batch(x, y)
            said.append(refusal_of(functools.partial(whole.read, path)))
    return said


def what_is_compressed(placement):
    """Returns bytes sent for gradients, opted-out gradients and own reductions; and whether the sums are exact."""
    strategy = strategy_of(placement, CODECS["int8"])
    with strategy.scope():
        weight = tf.Variable(tf.ones([64, 64]))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
    gradient = tf.random.stateless_normal([64, 64], [1, 2])

    def sent(function):
        before = strategy.communication.traffic().sent_bytes
        weight.assign(tf.ones([64, 64]))
        result = tf.function(lambda: strategy.run(function))()
        return strategy.communication.traffic().sent_bytes - before, result

    def apply():
        optimizer.apply([gradient], [weight])

    def opt_out():
        with compression.uncompressed():
            optimizer.apply([gradient], [weight])

    def reduce_own():
        return tf.distribute.get_replica_context().all_reduce("SUM", gradient)

    replicas = strategy.num_replicas_in_sync
    compressed, _ = sent(apply)
    plain, _ = sent(opt_out)
    exact = np.allclose((tf.ones([64, 64]) - weight).numpy(), gradient.numpy() * replicas, atol=1e-5)
    own, total = sent(reduce_own)
    total = strategy.experimental_local_results(total)[0]
    return compressed, plain, own, exact, bool(np.allclose(total, gradient * replicas, atol=1e-5))


def memory_of_two_models(placement):
    """Returns codec bytes of one model, of two, and after deleting the first; and the number of steps."""
    strategy = strategy_of(placement, CODECS["int8"])
    gc.freeze()  # Freeing earlier datasets may wait a minute for their tuners.
    before = strategy.communication.traffic()
    models, kept = [], []
    for _ in range(2):
        models.append(build(strategy, widths=FEW))
        models[-1].fit(*data(), batch_size=BATCH, epochs=1, verbose=0)
        kept.append(strategy.communication.memory_bytes())
    del models[0]
    keras.backend.clear_session()
    gc.collect()
    gc.unfreeze()
    models[0].fit(*data(), batch_size=BATCH, epochs=1, verbose=0)
    return [*kept, strategy.communication.memory_bytes()], (strategy.communication.traffic() - before).steps


class LateBack(layers.Layer):
    """Passes gradients on unchanged, on the last replica after a delay."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, x):
        context = tf.distribute.get_replica_context()
        if context is None:  # Keras infers the shape of the output
            return x
        is_last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1

        def wait(gradient, is_last):
            time.sleep(self.seconds if is_last else 0)
            return gradient

        @tf.custom_gradient
        def same(x):
            return tf.identity(x), lambda gradient: tf.ensure_shape(
                tf.numpy_function(wait, [gradient, is_last], gradient.dtype), gradient.shape
            )

        return same(x)


def traffic_with_a_late_replica(placement, codec, kind, late_seconds, steps=3):
    """Returns the traffic of steps in which gradients of the last replica are late, and the total delay in seconds."""
    strategy = strategy_of(placement, policy(codec), time_exchanges=True)
    with strategy.scope():
        first = layers.Embedding(50, 32) if kind == "rows" else layers.Dense(32)
        model = keras.Sequential([first, layers.Flatten(), LateBack(late_seconds), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((12, 8), "int32" if kind == "rows" else "float32"), np.zeros(12)
    model.train_on_batch(x, y)
    before = strategy.communication.traffic()
    for _ in range(steps):
        model.train_on_batch(x, y)
    return strategy.communication.traffic() - before, steps * late_seconds


def sparse(placement, codec):
    """Trains an embedding, which has sparse gradients."""
    strategy = strategy_of(placement, policy(codec))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((5,), dtype="int32"), layers.Embedding(50, 32), layers.Flatten(), layers.Dense(3)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 50, (48, 5)), rng.integers(0, 3, 48)
    history = model.fit(x, y, batch_size=12, epochs=4, verbose=0, shuffle=False).history
    traffic = strategy.communication.traffic()
    return outcome(model, history) | {"sent_bytes": traffic.sent_bytes, "raw_bytes": traffic.raw_bytes}


def updates_of_unlike_lists(placement):
    """Returns how far each of two equal variables moves; the optimizer updates them in turn, the second with zeros."""
    strategy = strategy_of(placement, tfdist.compression.TopK(0.01, min_elements=1))
    with strategy.scope():
        one, other = (keras.Variable(np.zeros((40, 30), "float32")) for _ in range(2))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([one, other])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones((40, 30))], [one]))
        strategy.run(lambda: optimizer.apply([tf.zeros((40, 30))], [other]))

    for _ in range(3):
        step()
    return float(np.abs(np.asarray(one)).sum()), float(np.abs(np.asarray(other)).sum())


def bytes_of_narrow_rows(placement):
    """Returns sent and raw bytes of sparse gradients with one number per row, which a codec would pad to a block."""
    strategy = strategy_of(placement, tfdist.compression.Int8(min_elements=1))
    before = strategy.communication.traffic()
    with strategy.scope():
        model = keras.Sequential([layers.Input((3,)), layers.Embedding(500, 1), layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
    tokens = np.arange(48).reshape(16, 3)
    model.fit(tokens, np.ones((16, 1)), batch_size=8, verbose=0)
    traffic = strategy.communication.traffic() - before
    return traffic.sent_bytes, traffic.raw_bytes


def bytes_of_small_tensors(placement, sizes):
    """Returns the bytes counted for the uncompressed exchange of a float32 vector of each size."""
    strategy = strategy_of(placement, "powersgd")  # does not compress vectors
    sent = []
    for size in sizes:
        with strategy.scope():
            weights = tf.Variable(tf.zeros([size]))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([weights])
        before = strategy.communication.traffic()
        step = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones([size])], [weights])))  # noqa: B023
        step()
        assert float(weights[0]) == -strategy.num_replicas_in_sync
        sent.append((strategy.communication.traffic() - before).sent_bytes)
    return sent
