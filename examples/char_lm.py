"""Trains a small transformer to write Python, one character at a time, on the source of the standard library.

One process (about a minute on 2 cores):
    python examples/char_lm.py

One process, 2 virtual devices:
    python examples/char_lm.py --devices 2

2 workers on this machine:
    tfdist run --workers 2 examples/char_lm.py

2 workers by hand, in two shells or on two machines (then with their addresses instead of localhost):
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 0}}' \
        python examples/char_lm.py
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 1}}' \
        python examples/char_lm.py
"""

import os
import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import batches, is_chief, make_strategy
from keras import layers

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 500, "Training steps.", 1)
flags.DEFINE_integer("batch_size", 32, "Rows per step on all workers together.", 1)
flags.DEFINE_integer("context", 64, "Number of characters in the model's input.", 1)
flags.DEFINE_integer("width", 128, "Size of a character's vector, a multiple of 4.", 4)
flags.register_validator("width", lambda width: width % 4 == 0, "must be a multiple of 4, the number of heads")
flags.DEFINE_integer("blocks", 2, "Transformer blocks.", 1)
flags.DEFINE_integer("seed", 0, "Seed of the weights and of the order of the data.")

VOCABULARY = 128  # ASCII


def read_text(size: int = 500_000) -> np.ndarray:
    """Returns the first `size` ASCII characters of the standard library, with modules sorted by name."""
    modules = sorted(pathlib.Path(os.__file__).parent.glob("[a-z]*.py"))
    text = "".join(module.read_text(encoding="utf-8") for module in modules)
    return np.frombuffer(text.encode("ascii", "ignore")[:size], np.uint8)


def windows(text: np.ndarray) -> tf.data.Dataset:
    """Returns pairs of inputs and next characters, each int32 of shape [context]."""
    length = FLAGS.context + 1
    rows = text[: len(text) // length * length].reshape(-1, length).astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))


def unigram_entropy(text: np.ndarray) -> float:
    """Returns the loss, in nats per character, of a model that only knows the frequency of each character."""
    frequency = np.bincount(text, minlength=VOCABULARY) / len(text)
    frequency = frequency[frequency > 0]
    return float(-(frequency * np.log(frequency)).sum())


class CharacterEmbedding(layers.Layer):
    """Adds a vector for the character and a vector for its position."""

    def __init__(self, context: int, width: int):
        super().__init__()
        self.characters = layers.Embedding(VOCABULARY, width)
        self.positions = layers.Embedding(context, width)

    def call(self, inputs):
        """[B, context] -> [B, context, width]."""
        return self.characters(inputs) + self.positions(tf.range(tf.shape(inputs)[1]))


def build_model(context: int, width: int, blocks: int) -> keras.Model:
    inputs = keras.Input((context,), dtype="int32")
    x = CharacterEmbedding(context, width)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(VOCABULARY)(x))  # [B, context, width] -> [B, context, VOCABULARY]


def main(_) -> None:
    strategy = make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    chief = is_chief(strategy)

    text = read_text()
    split = len(text) * 9 // 10
    train = batches(windows(text[:split]), FLAGS.batch_size, FLAGS.seed).repeat()
    validation = batches(windows(text[split:]), FLAGS.batch_size)

    with strategy.scope():
        model = build_model(FLAGS.context, FLAGS.width, FLAGS.blocks)
        model.compile(
            optimizer=keras.optimizers.AdamW(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    model.fit(train, steps_per_epoch=FLAGS.steps, verbose="auto" if chief else 0)
    # Each worker evaluates its share, and gets the result for the whole data.
    loss = model.evaluate(validation, verbose=0)

    if chief:
        print(f"unigram entropy: {unigram_entropy(text[split:]):.4f} nats per character")
        print(f"validation loss: {loss:.4f} nats per character", flush=True)


if __name__ == "__main__":
    app.run(main)
