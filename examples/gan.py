"""Trains a GAN with two optimizers in a custom `train_step`: it draws the digit that it is asked for.

One process (1000 of 1000 drawn digits are recognized):
    python examples/gan.py

One process, 2 virtual devices:
    python examples/gan.py --devices 2

2 workers on this machine:
    tfdist run --workers 2 examples/gan.py

2 workers by hand, in two shells or on two machines (then with their addresses instead of localhost):
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 0}}' \
        python examples/gan.py
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 1}}' \
        python examples/gan.py
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import batches, is_chief, make_strategy

import tfdist

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 1500, "Training steps.", 1)
flags.DEFINE_integer("batch_size", 64, "Rows per step on all workers together.", 1)
flags.DEFINE_string("data_dir", None, "Folder of the dataset. By default ~/tensorflow_datasets.")
flags.DEFINE_integer("seed", 0, "Seed of the weights, of the order of the data and of the noise.")

NOISE = 16  # numbers that a drawn image depends on, beside its label
SHADES = " .:-=+*#%@"


def dense_layers(units: int, activation: str | None = None) -> list[keras.Layer]:
    hidden = [keras.layers.Dense(128, activation="leaky_relu") for _ in range(2)]
    return [*hidden, keras.layers.Dense(units, activation=activation)]


class ConditionalGAN(keras.Model):
    """A generator that makes an image of noise and a label, and a discriminator of true and generated images."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((NOISE + 10,)), *dense_layers(64, "sigmoid")])
        self.discriminator = keras.Sequential([keras.Input((64,)), *dense_layers(10)])
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.discriminator_loss = keras.metrics.Mean(name="discriminator_loss")

    def compile(self, generator_optimizer: keras.Optimizer, discriminator_optimizer: keras.Optimizer):
        """Takes an optimizer for each network."""
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer

    def call(self, inputs):
        """Noise [B, NOISE] and labels [B] -> images [B, 64], from 0 to 1."""
        noise, labels = inputs
        return self.generator(tf.concat([noise, tf.one_hot(labels, 10)], axis=1))

    def judge(self, images, labels):
        """Images [B, 64] and labels [B] -> [B]: large where the discriminator takes an image for a true one."""
        return tf.reduce_sum(self.discriminator(images) * tf.one_hot(labels, 10), axis=1)  # one output per label

    def train_step(self, data):
        """Updates both networks on one batch."""
        inputs, true = data
        labels = inputs[1]
        with tf.GradientTape() as generator_tape, tf.GradientTape() as discriminator_tape:
            generated = self(inputs, training=True)
            of_true, of_generated = self.judge(true, labels), self.judge(generated, labels)
            discriminator_losses = tf.nn.softplus(-of_true) + tf.nn.softplus(of_generated)  # [B]
            generator_losses = tf.nn.softplus(-of_generated)  # [B]
            # Means over the rows, as on one device. tfdist weighs the gradients of the replicas by their rows.
            discriminator_loss = tf.reduce_mean(discriminator_losses)
            generator_loss = tf.reduce_mean(generator_losses)
        for tape, loss, network, optimizer in (
            (discriminator_tape, discriminator_loss, self.discriminator, self.discriminator_optimizer),
            (generator_tape, generator_loss, self.generator, self.generator_optimizer),
        ):
            optimizer.apply(tape.gradient(loss, network.trainable_weights), network.trainable_weights)
        self.discriminator_loss.update_state(discriminator_losses)  # the loss of each row, so that sums are exact
        self.generator_loss.update_state(generator_losses)
        return {metric.name: metric.result() for metric in (self.discriminator_loss, self.generator_loss)}


def with_noise(batch, seed):
    """Adds the noise in the input, not in the step. So a row has the same noise on any number of workers."""
    images, labels = batch
    noise = tf.random.stateless_normal([tf.shape(labels)[0], NOISE], [seed, 0])
    return (noise, labels), tf.reshape(tf.cast(images, tf.float32) / 255, [-1, 64])


def recognized(images: np.ndarray, labels: np.ndarray, known: tuple[np.ndarray, np.ndarray]) -> float:
    """Returns the share of images that have the label of the nearest known image."""
    known_images, known_labels = known
    squares = (images**2).sum(1)[:, None] - 2 * images @ known_images.T + (known_images**2).sum(1)
    return float((known_labels[squares.argmin(1)] == labels).mean())


def drawing(images: np.ndarray) -> str:
    """Returns images [N, 64] as lines of characters, side by side."""
    shades = np.array(list(SHADES))[(images * 9.99).astype(int)].reshape(-1, 8, 8)
    return "\n".join("  ".join("".join(row) for row in line) for line in shades.transpose(1, 0, 2))


def main(_) -> None:
    strategy = make_strategy()
    keras.utils.set_random_seed(FLAGS.seed)
    chief = is_chief(strategy)

    train = tfdist.data.load("digits", "train", FLAGS.data_dir)
    data = batches(train, FLAGS.batch_size, FLAGS.seed).repeat()
    data = tf.data.Dataset.zip(data, tf.data.Dataset.random(FLAGS.seed)).map(with_noise)

    with strategy.scope():
        gan = ConditionalGAN()
        rates = [keras.optimizers.schedules.CosineDecay(rate, FLAGS.steps) for rate in (2e-3, 1e-3)]
        gan.compile(*(keras.optimizers.Adam(rate, beta_1=0.5) for rate in rates))

    epochs = max(FLAGS.steps // 150, 1)
    gan.fit(data, epochs=epochs, steps_per_epoch=FLAGS.steps // epochs, verbose="auto" if chief else 0)

    labels = np.arange(1000) % 10
    noise = np.random.default_rng(FLAGS.seed).normal(size=(len(labels), NOISE)).astype(np.float32)
    images = gan.predict((noise, labels), batch_size=250, verbose=0)  # on all workers: each draws its share
    if chief:
        known_images, known_labels = next(train.batch(len(train)).as_numpy_iterator())
        known_images = known_images.reshape(-1, 64).astype(np.float32) / 255
        print(drawing(images[:10]))
        share = recognized(images, labels, (known_images, known_labels))
        print(f"recognized digits: {share:.4f}", flush=True)


if __name__ == "__main__":
    app.run(main)
