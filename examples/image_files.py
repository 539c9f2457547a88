"""Classifies images in TFRecord files, with parsing and augmentation in `tf.data`.

The first run writes the files: PNG images, in several files for training and for the test.

One process (97.3 % test accuracy):
    python examples/image_files.py

One process, 2 virtual devices:
    python examples/image_files.py --devices 2

2 workers on this machine:
    tfdist run --workers 2 examples/image_files.py

2 workers by hand, in two shells or on two machines (then with their addresses instead of localhost):
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 0}}' \
        python examples/image_files.py
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 1}}' \
        python examples/image_files.py
"""

import functools
import pathlib

import keras
import tensorflow as tf
from absl import app, flags
from common import batches, is_chief, make_strategy

import tfdist

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "digits", ["digits", "mnist", "cifar10"], "All but digits are downloaded once.")
flags.DEFINE_integer("epochs", 20, "Passes over the training data.", 1)
flags.DEFINE_integer("batch_size", 64, "Rows per step on all workers together, a multiple of their devices.", 1)
flags.DEFINE_bool("augment", True, "Move each training image by a random distance, up to an eighth of its size.")
flags.DEFINE_string("data_dir", None, "Folder of the dataset. By default ~/tensorflow_datasets.")
flags.DEFINE_string("folder", "~/tfdist_image_files", "Folder of the TFRecord files, which all workers must reach.")
flags.DEFINE_integer("seed", 0, "Seed of the weights, of the order of the data and of the augmentation.")

FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def write_files(folder: pathlib.Path, files: int = 4) -> None:
    """Writes both splits as PNG images, each into several files. Stands for the program that makes your files."""
    started = folder.with_name(folder.name + ".part")
    started.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        writers = [tf.io.TFRecordWriter(f"{started}/{split}-{i}.tfrecord") for i in range(files)]
        for row, (image, label) in enumerate(tfdist.data.load(FLAGS.dataset, split, FLAGS.data_dir)):
            png = tf.train.BytesList(value=[tf.io.encode_png(image).numpy()])
            features = {
                "image": tf.train.Feature(bytes_list=png),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writers[row % files].write(example.SerializeToString())
        for writer in writers:
            writer.close()
    started.rename(folder)  # last, so that a folder of this name is complete


def read(folder: pathlib.Path, split: str) -> tf.data.Dataset:
    """Returns serialized examples, read from all files in turn, in the same order on each worker."""
    files = tf.data.Dataset.list_files(f"{folder}/{split}-*.tfrecord", shuffle=False)
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=4)
    rows = records.reduce(tf.constant(0, tf.int64), lambda rows, _: rows + 1)  # Files do not tell their number of rows.
    return records.apply(tf.data.experimental.assert_cardinality(rows))


def parse(record, shape=(None, None, None)):
    example = tf.io.parse_single_example(record, FEATURES)
    return tf.ensure_shape(tf.io.decode_png(example["image"]), shape), example["label"]


def parse_and_move(record, seed, shape):
    """Moves the image by up to an eighth of its size in each direction; by the same distance for the same seed."""
    image, label = parse(record, shape)
    border = shape[0] // 8
    padded = tf.pad(image, [[border, border], [border, border], [0, 0]])
    return tf.image.stateless_random_crop(padded, shape, [seed, 0]), label


def training_data(
    records: tf.data.Dataset, shape: tuple[int, ...], context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """Returns the batches of one worker. All workers shuffle alike, and each decodes only its rows of each batch."""
    rows = records.shuffle(10_000, FLAGS.seed).repeat()
    rows = tf.data.Dataset.zip(rows, tf.data.Dataset.random(FLAGS.seed))  # another seed for each row in each epoch
    # Of two workers, worker 0 takes rows 0, 2, 4 and so on. So both together have the global batches of one device.
    rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
    if FLAGS.augment:
        rows = rows.map(lambda record, seed: parse_and_move(record, seed, shape), num_parallel_calls=2)
    else:
        rows = rows.map(lambda record, _: parse(record, shape), num_parallel_calls=2)
    rows = rows.batch(context.get_per_replica_batch_size(FLAGS.batch_size)).prefetch(2)
    options = tf.data.Options()
    options.autotune.enabled = False  # There is nothing to tune, and TensorFlow may take long to stop the tuner.
    return rows.with_options(options)


def build_model(shape: tuple[int, ...]) -> keras.Model:
    layers = [keras.Input(shape), keras.layers.Rescaling(1 / 255)]
    for filters in (32, 64):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])


def wait_for_all(strategy: tf.distribute.Strategy) -> None:
    """Returns when all workers have called it, since a sum over the replicas needs all of them."""
    tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.constant(1)), axis=None))()


def main(_) -> None:
    strategy = make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    chief = is_chief(strategy)

    folder = pathlib.Path(FLAGS.folder).expanduser() / FLAGS.dataset
    if chief and not folder.exists():
        write_files(folder)
    wait_for_all(strategy)  # until the files are complete
    train, test = read(folder, "train"), read(folder, "test")
    shape = tuple(parse(next(iter(train)))[0].shape)
    steps = len(train) // FLAGS.batch_size
    train = strategy.distribute_datasets_from_function(functools.partial(training_data, train, shape))
    moved = tf.data.Dataset.zip(test, tf.data.Dataset.random(FLAGS.seed))
    moved = batches(moved.map(lambda record, seed: parse_and_move(record, seed, shape)), FLAGS.batch_size)
    test = batches(test.map(lambda record: parse(record, shape)), FLAGS.batch_size)

    with strategy.scope():
        model = build_model(shape)
        model.compile(
            optimizer=keras.optimizers.Adam(3e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    model.fit(train, epochs=FLAGS.epochs, steps_per_epoch=steps, validation_data=test, verbose="auto" if chief else 0)
    # Each worker evaluates its share, and gets the result for the whole data.
    accuracy = model.evaluate(test, verbose=0, return_dict=True)["accuracy"]
    accuracy_moved = model.evaluate(moved, verbose=0, return_dict=True)["accuracy"]
    if chief:
        print(f"accuracy on moved test images: {accuracy_moved:.4f}")
        print(f"test accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    app.run(main)
