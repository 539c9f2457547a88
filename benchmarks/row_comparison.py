"""Measures the cost of comparing the rows that workers read, for each batch of a training.

    python -m benchmarks.row_comparison                       # about a minute on an idle core
    python -m benchmarks.row_comparison --step_ms 16          # also as a part of a step that takes 16 ms

Two pipelines read the same arrays in turns, one with the stage of `RowComparison` and one without. The difference is
the cost. It falls on a thread of `tf.data`, which prepares batches while the step runs, so that the processor time
counts, and not the time on the clock. The output shows medians and quartiles over the rounds.
"""

import statistics
import time

import numpy as np
import tensorflow as tf
from absl import app, flags

from tfdist.strategies.row_comparison import RowComparison, RowsRead
from tfdist.strategies.tensor_origin import origins_of

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 21, "Passes over the data with each pipeline.", 3)
flags.DEFINE_integer("batches", 4000, "Batches in a pass.", 1)
flags.DEFINE_integer("batch_size", 64, "Rows in a batch.", 1)
flags.DEFINE_integer("features", 64, "Numbers in a row.", 1)
flags.DEFINE_float("step_ms", None, "Milliseconds of a step, to show the cost as a part of it.", 0)


class _Alone:
    """The agreement of a lone worker."""

    here, speaks = "worker 0", True

    def next_name(self, prefix):
        """Returns a name for a comparison."""
        return prefix

    def say_late(self, name):
        """Tells nobody."""

    def is_alike(self, *_):
        """Finds no difference."""
        return True


def microseconds_per_batch(dataset: tf.data.Dataset) -> float:
    """Processor time of one pass over a dataset, divided by its batches."""
    start = time.process_time()
    batches = dataset.reduce(0, lambda count, *_: count + 1)
    return 1e6 * (time.process_time() - start) / int(batches)


def main(argv):
    """Runs the rounds and prints the cost."""
    del argv
    rows = FLAGS.batches * FLAGS.batch_size
    arrays = np.zeros([rows, FLAGS.features], np.float32), np.zeros([rows], np.int64)
    plain = tf.data.Dataset.from_tensor_slices(arrays).batch(FLAGS.batch_size)
    comparison = RowComparison(
        _Alone(), origins_of(plain), None, "fit", False, RowsRead("/device:CPU:0", 1), True, False
    )
    watched = comparison.watch(plain, lambda batch: tf.constant(True))
    costs = []
    for _ in range(FLAGS.rounds):
        with comparison.beginning():
            pass
        with_stage = microseconds_per_batch(watched)
        costs.append(with_stage - microseconds_per_batch(plain))
    low, middle, high = statistics.quantiles(costs[1:], n=4)  # The first pass also builds the pipelines.
    print(f"The comparison takes {middle:.1f} [{low:.1f}-{high:.1f}] microseconds of processor time for each batch.")
    if FLAGS.step_ms:
        print(f"That is {middle / FLAGS.step_ms / 10:.2f} % of a step of {FLAGS.step_ms:g} ms.")


if __name__ == "__main__":
    app.run(main)
