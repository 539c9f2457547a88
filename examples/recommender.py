"""Recommends items to users by two tables of embeddings. Their sparse gradients travel as rows.

One process (32 s of CPU time, hit rate 0.71, by popularity 0.55):
    python examples/recommender.py

One process, 2 virtual devices:
    python examples/recommender.py --devices 2

2 workers on this machine:
    tfdist run --workers 2 examples/recommender.py

2 workers by hand, in two shells or on two machines (then with their addresses instead of localhost):
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 0}}' \
        python examples/recommender.py
    TF_CONFIG='{"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 1}}' \
        python examples/recommender.py
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import batches, is_chief, make_strategy
from keras import layers

FLAGS = flags.FLAGS
flags.DEFINE_integer("users", 20_000, "Number of users.", 1)
flags.DEFINE_integer("items", 5_000, "Number of items.", 1)
flags.DEFINE_integer("width", 32, "Size of the vector of a user or an item.", 1)
flags.DEFINE_integer("epochs", 3, "Passes over the training data.", 1)
flags.DEFINE_integer("batch_size", 2048, "Rows per step on all workers together.", 1)
flags.DEFINE_string("compression", None, "Codec of the gradients, such as int8.")
flags.DEFINE_integer("seed", 0, "Seed of the data, of the weights and of the order of the data.")

TASTES = 20  # groups of items that the same users like
EACH = 20  # items that each user chose, the last one for the test


def generate(rng: np.random.Generator) -> np.ndarray:
    """Returns the items that each user chose, [users, EACH]. A user has two tastes, and some items please everybody."""
    popularity = rng.normal(scale=0.5, size=FLAGS.items)
    liking = np.exp(popularity + 2.5 * rng.normal(size=(TASTES, FLAGS.items)))  # [TASTES, items]
    steps = np.cumsum(liking, axis=1) / liking.sum(axis=1, keepdims=True)
    tastes = rng.integers(TASTES, size=(FLAGS.users, 2))
    taste = np.take_along_axis(tastes, rng.integers(2, size=(FLAGS.users, EACH)), axis=1)
    draws = rng.random(taste.shape)
    chosen = np.zeros(taste.shape, np.int32)
    for number in range(TASTES):
        of = taste == number
        chosen[of] = np.searchsorted(steps[number], draws[of]).clip(max=FLAGS.items - 1)
    return chosen


def candidates(chosen: np.ndarray, others: int, rng: np.random.Generator) -> np.ndarray:
    """Puts each chosen item before `others` random items. [users, n] -> [users * n, 1 + others]."""
    random = rng.integers(FLAGS.items, size=(chosen.size, others), dtype=np.int32)
    return np.concatenate([chosen.reshape(-1, 1), random], axis=1)


def dataset(rows: np.ndarray) -> tf.data.Dataset:
    """Returns rows ((user, candidates), 0): the item that the user chose is candidate 0."""
    users = np.repeat(np.arange(FLAGS.users, dtype=np.int32), len(rows) // FLAGS.users)
    return tf.data.Dataset.from_tensor_slices(((users, rows), np.zeros(len(rows), np.int32)))


def build_model() -> keras.Model:
    user, items = keras.Input((), dtype="int32"), keras.Input((None,), dtype="int32")
    taste = layers.Embedding(FLAGS.users, FLAGS.width, name="users")(user)  # [B, width]
    vectors = layers.Embedding(FLAGS.items, FLAGS.width, name="items")(items)  # [B, n, width]
    popularity = layers.Embedding(FLAGS.items, 1, "zeros", name="popularity")(items)
    fits = layers.Dot(axes=(2, 1))([vectors, taste])  # [B, n]
    return keras.Model([user, items], layers.Add()([fits, layers.Flatten()(popularity)]))


def hit_rate(scores: np.ndarray) -> float:
    """Returns in how many of the rows [rows, candidates] candidate 0, the chosen item, is among the best ten."""
    return float(((scores[:, 1:] >= scores[:, :1]).sum(axis=1) < 10).mean())


def main(_) -> None:
    strategy = make_strategy(FLAGS.compression)
    keras.utils.set_random_seed(FLAGS.seed)
    chief = is_chief(strategy)

    rng = np.random.default_rng(FLAGS.seed)  # the same on all workers, so all make the same data
    chosen = generate(rng)
    past, last = chosen[:, :-1], chosen[:, -1:]
    test = candidates(last, 99, rng)
    train = batches(dataset(candidates(past, 3, rng)), FLAGS.batch_size, FLAGS.seed)

    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    model.fit(train, epochs=FLAGS.epochs, verbose="auto" if chief else 0)
    # Each worker computes its share of the scores, and gets all of them.
    scores = model.predict(batches(dataset(test), FLAGS.batch_size), verbose=0)

    if chief:
        if FLAGS.compression:
            print(f"sent by this process: {strategy.communication.traffic().sent_bytes_per_step / 1000:.0f} kB a step")
        popularity = np.bincount(past.ravel(), minlength=FLAGS.items)[test]
        print(f"hit rate of popularity: {hit_rate(popularity):.4f}")
        print(f"hit rate: {hit_rate(scores):.4f}", flush=True)


if __name__ == "__main__":
    app.run(main)
