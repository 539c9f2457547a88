"""Code shared by the examples: chooses a strategy, and batches a dataset."""

import os

import tensorflow as tf
from absl import app, flags

import tfdist

flags.DEFINE_integer("devices", 0, "Virtual CPU devices to train on without TF_CONFIG. 0: all GPUs, else the CPU.", 0)
flags.DEFINE_integer("local_steps", 0, "Steps between two synchronizations by DiLoCo. 0: each step sums gradients.", 0)


def make_strategy(compression: str | None = None) -> tf.distribute.Strategy:
    """Returns a strategy for several workers if TF_CONFIG is set, else for this machine's devices. Call it first."""
    every = flags.FLAGS.local_steps
    options = {"compression": compression, "synchronization": tfdist.DiLoCo(every) if every else None}
    if os.environ.get("TF_CONFIG"):
        return tfdist.MultiWorkerMirroredStrategy(**options)
    devices = flags.FLAGS.devices
    if not devices:
        return tfdist.MirroredStrategy(**options)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return tfdist.MirroredStrategy([f"CPU:{i}" for i in range(devices)], **options)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that prints and saves."""
    return strategy.extended.should_checkpoint


def batches(dataset: tf.data.Dataset, batch_size: int, seed: int | None = None) -> tf.data.Dataset:
    """Returns global batches of `batch_size` rows, shuffled if a seed is given."""
    rows = int(dataset.cardinality())  # negative if unknown
    if seed is not None and 0 <= rows < batch_size:
        raise app.UsageError(
            f"--batch_size must be at most the number of rows, {rows}, since training drops incomplete batches, got "
            f"{batch_size}. Give a smaller one."
        )
    dataset = dataset.cache()
    if seed is not None:
        # All workers use the same seed and take their shares of the same order, so no row is read twice or left out.
        dataset = dataset.shuffle(10_000, seed=seed)
    # Training drops an incomplete last batch, so that all replicas get equal numbers of rows.
    dataset = dataset.batch(batch_size, drop_remainder=seed is not None).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False  # There is nothing to tune, and TensorFlow may take long to stop the tuner.
    return dataset.with_options(options)
