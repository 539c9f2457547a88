"""Rows for the inputs of a model."""

import os
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from keras_features.table import BATCH, STEPS, built, compiled, data, fit, outcome, row


@row()
def input_tf_data(place):
    model = built(place)
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    return outcome(model, model.fit(dataset, verbose=0).history)


@row()
def input_tf_data_infinite(place):
    model = built(place)
    dataset = tf.data.Dataset.from_tensor_slices(data()).repeat().batch(BATCH)
    return outcome(model, model.fit(dataset, steps_per_epoch=5, epochs=2, verbose=0).history)


def files(place, name, parts, write):
    """Returns paths of files that only this worker reads."""
    folder = os.path.join(place.folder, f"{name}-{os.getpid()}")
    os.makedirs(folder)
    paths = [os.path.join(folder, str(number)) for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write(path, part)
    return paths


def order_options(deterministic=True):
    options = tf.data.Options()
    options.deterministic = deterministic
    return options


@row(placements=("2x1",), same_bits=False)
def input_fewer_files_than_workers(place):
    def write(path, rows):
        with tf.io.TFRecordWriter(path) as writer:
            for own in rows:
                writer.write(tf.io.serialize_tensor(own).numpy())

    def parsed(record):
        own = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [7])
        return own[:6], own[6]

    x, y = data(37)
    paths = files(place, "records", [np.c_[x, y].astype("float32")], write)
    dataset = tf.data.TFRecordDataset(paths).map(parsed).batch(BATCH).with_options(order_options())
    model = built(place)
    history = model.fit(dataset, verbose=0, epochs=2, validation_data=dataset).history
    return outcome(model, history, predicted=model.predict(dataset, verbose=0))


@row(placements=("2x1",))
def input_files_of_unlike_lengths_in_no_order(place):
    """Without a fixed order, workers would read in different orders, since each line's time depends on the worker."""
    shares_out = place.name.startswith("2")
    is_first = tfdist.cluster.is_chief()

    def linger(line):
        time.sleep(0.02 * ((len(line) + is_first) % 2) * shares_out)
        return line

    def parsed(line):
        line = tf.ensure_shape(tf.numpy_function(linger, [line], tf.string), [])
        own = tf.strings.to_number(tf.ensure_shape(tf.strings.split(line), [7]))
        return own[:6], own[6]

    x, y = data(40)
    rows = np.c_[x, y]
    paths = files(place, "lines", [rows[:5], rows[5:17], rows[17:]], np.savetxt)
    dataset = tf.data.Dataset.from_tensor_slices(paths).interleave(tf.data.TextLineDataset, cycle_length=3)
    dataset = dataset.map(parsed, num_parallel_calls=4).prefetch(1)  # Without `prefetch`, fused maps keep the order.
    dataset = dataset.batch(BATCH).with_options(order_options(not shares_out))
    model = built(place)
    history = model.fit(dataset, verbose=0).history
    return outcome(model, history, predicted=model.predict(dataset, verbose=0))


@row()
def input_words(place):
    """The model looks up strings."""
    words = ["one", "two", "three", "four"]
    texts = np.array([f"{words[i % 4]} {words[i % 3]} {'?' * (i % 2)} {words[i % 2]}" for i in range(36)])

    def make():
        vectors = layers.TextVectorization(vocabulary=words, output_sequence_length=4)
        return keras.Sequential(
            [layers.Input((), dtype="string"), vectors, layers.Embedding(6, 4), layers.Flatten(), layers.Dense(3)]
        )

    dataset = tf.data.Dataset.from_tensor_slices((texts, np.arange(36) % 3)).batch(BATCH).with_options(order_options())
    model = built(place, make)
    history = model.fit(dataset, verbose=0).history
    return outcome(model, history, predicted=model.predict(dataset, verbose=0))


class Particular(keras.Model):
    """Parses, decodes and checks its input. Zeros and empty strings make the checks fail."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(6, 4), layers.Dense(3)

    def call(self, x):
        numbers = tf.strings.to_number(x["number"])[:, None]
        decode = lambda image: tf.ensure_shape(tf.io.decode_png(image, channels=1), [2, 2, 1])  # noqa: E731
        images = tf.map_fn(decode, x["image"], fn_output_signature=tf.TensorSpec([2, 2, 1], tf.uint8))
        pixels = tf.reshape(tf.cast(images, tf.float32), [-1, 4]) / 255
        with tf.control_dependencies(
            [tf.debugging.assert_positive(x["ids"]), tf.debugging.assert_less(x["ids"], tf.constant(6, tf.int64))]
        ):
            vectors = tf.reduce_mean(self.embedding(tf.identity(x["ids"])), axis=1)
        return self.dense(tf.concat([numbers, pixels, vectors], axis=1))


class ParticularStep(Particular):
    """The same model with a custom training step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def particular(rows):
    """Returns rows that `Particular` accepts."""
    x = {
        "number": np.array([f"{i / rows:.3f}" for i in range(rows)]),
        "image": np.array([tf.io.encode_png(np.full((2, 2, 1), 200, "uint8")).numpy()] * rows),
        "ids": 1 + np.arange(2 * rows).reshape(rows, 2) % 5,
    }
    return tf.data.Dataset.from_tensor_slices((x, np.arange(rows) % 3)).batch(4).with_options(order_options())


def read_by_particular(place, make, **kwargs):
    model = built(place, make, **kwargs)
    predicted = model.predict(particular(1), verbose=0)  # a single row, before the model has read any other
    evaluated = model.evaluate(particular(1), verbose=0)
    history = model.fit(particular(9), verbose=0, epochs=2, validation_data=particular(5)).history
    return outcome(
        model, history, predicted=predicted, evaluated=evaluated, after=model.predict(particular(9), verbose=0)
    )


@row()
def input_that_is_parsed_and_checked(place):
    return read_by_particular(place, Particular)


@row()
def input_that_is_parsed_and_checked_eagerly(place):
    return read_by_particular(place, Particular, run_eagerly=True)


@row()
def input_that_a_step_parses_and_checks(place):
    return read_by_particular(place, ParticularStep)


@row(placements=("2x1",))
def input_that_is_parsed_from_a_sharding(place):
    rows = list(particular(9).unbatch())
    x = {name: np.array([row[0][name].numpy() for row in rows]) for name in rows[0][0]}

    def sharding():
        return tfdist.data.BalancedSharding((x, np.arange(9) % 3), 4, policy="equal", shuffle=False)

    def distributed():
        return place.strategy.distribute_datasets_from_function(sharding()) if place.strategy else sharding()()

    model = built(place, Particular)
    history = model.fit(distributed(), verbose=0, epochs=2, class_weight={0: 1.0, 1: 2.0, 2: 1.0}).history
    model.train_on_batch(*next(iter(particular(1))))
    return outcome(model, history)


@row(exempt="workers read other rows than one device")
def input_that_is_parsed_and_ends_early(place):
    def dataset_fn(context):
        return particular(8 - 4 * context.input_pipeline_id)

    distribute = place.strategy.distribute_datasets_from_function if place.strategy else lambda fn: fn(Context())
    model = built(place, Particular)
    history = model.fit(distribute(dataset_fn), verbose=0, epochs=2).history
    again = place.strategy.experimental_distribute_dataset(particular(9)) if place.strategy else particular(9)
    return outcome(
        model, {**history, **{f"{name} again": values for name, values in model.fit(again, verbose=0).history.items()}}
    )


@row()
def input_last_batch_short(place):
    model = built(place)
    x, y = data(37)
    history = fit(model, x, y, epochs=2)
    return outcome(model, history)


@row()
def input_last_batch_of_one_row(place):
    model = built(place)
    x, y = data(33)
    return outcome(model, fit(model, x, y, epochs=2))


@row()
def input_first_batch_does_not_divide(place):
    model = built(place)
    x, y = data(35)
    return outcome(model, model.fit(x, y, batch_size=7, verbose=0, shuffle=False).history)


@row(placements=("2x1",))
def input_unequal_rows_per_worker(place):
    """One replica reads 3 of each 8 rows, and the other reads 5; one device reads the same global batches."""
    model = built(place)
    x, y = data()

    def dataset_fn(context):
        sizes = {1: [8], 2: [3, 5], 4: [1, 2, 3, 2]}[context.num_replicas_in_sync]
        local = len(sizes) // context.num_input_pipelines
        own = range(context.input_pipeline_id * local, (context.input_pipeline_id + 1) * local)

        def batches():
            for start in range(0, len(x), BATCH):
                for replica in own:
                    low = start + sum(sizes[:replica])
                    yield x[low : low + sizes[replica]], y[low : low + sizes[replica]]

        spec = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int64))
        return tf.data.Dataset.from_generator(batches, output_signature=spec)

    if place.strategy:
        dataset = place.strategy.distribute_datasets_from_function(dataset_fn)
    else:
        dataset = dataset_fn(tf.distribute.InputContext())
    return outcome(model, model.fit(dataset, verbose=0).history)


@row(
    placements=("2x1",),
    exempt="a worker runs out of rows before the other: one device has no such thing",
    same_bits=False,
)
def input_one_worker_ends_early(place):
    model = built(place)
    x, y = data()

    def dataset_fn(context):
        rows = 40 - 16 * context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(4)

    dataset = place.strategy.distribute_datasets_from_function(dataset_fn) if place.strategy else (x[:40], y[:40])
    if not place.strategy:
        return outcome(model, fit(model, *dataset))
    history = model.fit(dataset, verbose=0).history
    if not np.isfinite(history["loss"]).all():
        raise AssertionError(f"loss {history['loss']}")
    return outcome(model, history)


@row(exempt="a worker runs out of rows before the other: one device has no such thing", same_bits=False)
def input_of_unlike_lengths_that_ends_early(place):
    def dataset_fn(context):
        def examples():
            for i in range(40 - 16 * context.input_pipeline_id):
                yield np.ones(3 + i % 4, "int32"), i % 3

        spec = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int64))
        return tf.data.Dataset.from_generator(examples, output_signature=spec).padded_batch(4)

    model = built(place, lambda: keras.Sequential([layers.Embedding(9, 4), layers.LSTM(5), layers.Dense(3)]))
    distribute = place.strategy.distribute_datasets_from_function if place.strategy else lambda fn: fn(Context())
    return outcome(model, model.fit(distribute(dataset_fn), verbose=0).history)


class Context:
    input_pipeline_id, num_input_pipelines, num_replicas_in_sync = 0, 1, 1


@row(same_bits=False)
def input_padded_by_each_replica(place):
    """Sentences have 1 to 6 words. A replica pads to its own longest sentence, one device to the longest of all."""
    x = np.arange(1, 7) * (np.arange(6) <= (np.arange(12) * 5 % 6)[:, None])

    def dataset_fn(context):
        own, rows = context.num_replicas_in_sync // context.num_input_pipelines, 4 // context.num_replicas_in_sync
        first = context.input_pipeline_id * own

        def batches():
            for step in range(3):
                for replica in range(first, first + own):
                    batch = x[4 * step + rows * replica :][:rows]
                    batch = batch[:, : np.count_nonzero(batch, axis=1).max()]
                    yield batch, batch % 3

        return tf.data.Dataset.from_generator(batches, output_signature=(tf.TensorSpec([None, None], tf.int64),) * 2)

    model = built(
        place,
        lambda: keras.Sequential([layers.Input((None,)), layers.Embedding(9, 4, mask_zero=True), layers.Dense(3)]),
        metrics=None,
    )
    distribute = place.strategy.distribute_datasets_from_function if place.strategy else lambda fn: fn(Context())
    return outcome(model, model.fit(distribute(dataset_fn), verbose=0).history)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        x, y = data()
        return x[index * BATCH : (index + 1) * BATCH], y[index * BATCH : (index + 1) * BATCH]


@row()
def input_py_dataset(place):
    model = built(place)
    return outcome(model, model.fit(Batches(), verbose=0, shuffle=False).history)


@row()
def input_generator(place):
    model = built(place)
    x, y = data()

    def batches():
        while True:
            for i in range(0, len(x), BATCH):
                yield x[i : i + BATCH], y[i : i + BATCH]

    return outcome(model, model.fit(batches(), steps_per_epoch=5, epochs=2, verbose=0).history)


def two_towers():
    a, b = layers.Input((6,), name="a"), layers.Input((6,), name="b")
    hidden = layers.Dense(5, activation="tanh")(layers.Concatenate()([a, b]))
    outputs = {"label": layers.Dense(3, name="label")(hidden), "value": layers.Dense(1, name="value")(hidden)}
    return keras.Model({"a": a, "b": b}, outputs)


@row()
def input_dict_several_outputs(place):
    with place.scope():
        model = two_towers()
        model.compile(
            "sgd",
            loss={"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"},
            loss_weights={"label": 1.0, "value": 0.5},
            metrics={"label": ["accuracy"], "value": ["mae"]},
        )
    x, y = data(36)
    targets = {"label": y, "value": x[:, :1]}
    history = fit(model, {"a": x, "b": x[:, ::-1]}, targets)
    predicted = model.predict({"a": x[:9], "b": x[:9]}, verbose=0)
    return outcome(model, history, label=predicted["label"], value=predicted["value"])


@row()
def input_nested(place):
    with place.scope():
        a, b = layers.Input((6,)), layers.Input((6,))
        model = keras.Model([a, {"b": b}], layers.Dense(3)(layers.Add()([a, b])))
        compiled(model)
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices(((x, {"b": x}), y)).batch(BATCH)
    return outcome(model, model.fit(dataset, verbose=0).history)


@row()
def validation_data(place):
    model = built(place)
    x, y = data(37)
    return outcome(model, fit(model, epochs=2, validation_data=(x, y)))


@row()
def validation_split(place):
    model = built(place)
    x, y = data(50)
    return outcome(model, fit(model, x, y, epochs=2, validation_split=0.25))


@row()
def class_weight(place):
    model = built(place)
    return outcome(model, fit(model, class_weight={0: 0.5, 1: 1.0, 2: 3.0}))


@row()
def sample_weight(place):
    model = built(place, weighted_metrics=["accuracy"])
    x, y = data(36)
    return outcome(model, fit(model, x, y, sample_weight=np.linspace(0, 2, 36)))
