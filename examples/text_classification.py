"""Tells from which package of Python's standard library a piece of code comes, with a model that takes strings.

One process (29 s of CPU time, 93 % test accuracy):
    python examples/text_classification.py

One process, 2 virtual devices:
    python examples/text_classification.py --devices 2

2 workers on this machine:
    tfdist run --workers 2 examples/text_classification.py

2 workers by hand, in two shells or on two machines (then with their addresses instead of localhost):
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 0}}' \
        python examples/text_classification.py
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 1}}' \
        python examples/text_classification.py
"""

import collections
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import batches, is_chief, make_strategy
from keras import layers

import tfdist

FLAGS = flags.FLAGS
flags.DEFINE_string("dataset", None, "A TFDS dataset of texts and labels, such as ag_news_subset, downloaded once.")
flags.DEFINE_string("data_dir", None, "Folder of the TFDS dataset. By default ~/tensorflow_datasets.")
flags.DEFINE_integer("epochs", 3, "Passes over the training data.", 1)
flags.DEFINE_integer("batch_size", 64, "Rows per step on all workers together.", 1)
flags.DEFINE_integer("vocabulary", 5000, "Number of words that the model knows.", 3)
flags.DEFINE_integer("width", 32, "Size of a word's vector.", 1)
flags.DEFINE_integer("seed", 0, "Seed of the weights and of the order of the data.")
flags.DEFINE_string("save", None, "Write the trained model, which takes strings, to this .keras file.")

PACKAGES = ["asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml"]
LINES, WORDS = 5, 64  # lines of a piece of code; words that the model reads of a text


def read_pieces() -> tuple[list[str], list[int]]:
    """Returns pieces of `LINES` lines of the standard library, and the number of the package of each."""
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        for module in sorted(pathlib.Path(os.__file__).with_name(package).rglob("*.py")):
            lines = [line for line in module.read_text(encoding="utf-8").splitlines() if line.strip()]
            pieces = ["\n".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES)]
            texts += pieces
            labels += [label] * len(pieces)
    return texts, labels


def load() -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """Returns the data for training and for the test, pairs of a string and a label, and the number of classes."""
    if FLAGS.dataset:
        train, test = (tfdist.data.load(FLAGS.dataset, split, FLAGS.data_dir) for split in ("train", "test"))
        return train, test, 1 + max(int(label) for _, label in train)
    texts, labels = (np.array(each) for each in read_pieces())
    held_out = np.arange(len(texts)) % 10 == 9
    train, test = (tf.data.Dataset.from_tensor_slices((texts[of], labels[of])) for of in (~held_out, held_out))
    return train, test, len(PACKAGES)


@keras.saving.register_keras_serializable("examples")
def split_names(text: tf.Tensor) -> tf.Tensor:
    """`self.getHeader(name)` -> `self get header name`."""
    text = tf.strings.regex_replace(text, "([a-z])([A-Z])", r"\1 \2")
    return tf.strings.lower(tf.strings.regex_replace(text, "[^A-Za-z]+", " "))


def share_of_largest_class(dataset: tf.data.Dataset) -> float:
    """Returns the accuracy of always answering the most frequent label."""
    counts = collections.Counter(int(label) for _, label in dataset)
    return max(counts.values()) / counts.total()


def main(_) -> None:
    strategy = make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    chief = is_chief(strategy)
    train_texts, test_texts, classes = load()

    # Every worker reads the same texts, so all have the same vocabulary.
    vectorize = layers.TextVectorization(FLAGS.vocabulary, standardize=split_names, output_sequence_length=WORDS)
    vectorize.adapt(train_texts.batch(1024).map(lambda text, label: text))

    def numbers(texts: tf.data.Dataset) -> tf.data.Dataset:  # Strings stay in the pipeline: no GPU takes them.
        return texts.map(lambda text, label: (vectorize(text), label))

    train = numbers(batches(train_texts, FLAGS.batch_size, FLAGS.seed))
    test = numbers(batches(test_texts, FLAGS.batch_size))

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((WORDS,), dtype="int64"),
                layers.Embedding(FLAGS.vocabulary, FLAGS.width),
                layers.Conv1D(FLAGS.width, 3, activation="relu"),
                layers.GlobalMaxPooling1D(),  # [B, WORDS - 2, width] -> [B, width]
                layers.Dense(classes),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(3e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    model.fit(train, epochs=FLAGS.epochs, validation_data=test, verbose="auto" if chief else 0)
    # Each worker evaluates its share, and gets the result for the whole data.
    accuracy = model.evaluate(test, verbose=0, return_dict=True)["accuracy"]

    if chief:
        print(f"share of the largest class: {share_of_largest_class(test_texts):.4f}")
        print(f"test accuracy: {accuracy:.4f}", flush=True)
        if FLAGS.save:
            keras.Sequential([keras.Input((), dtype="string"), vectorize, model]).save(FLAGS.save)


if __name__ == "__main__":
    app.run(main)
