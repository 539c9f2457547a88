"""What the examples share: how they choose a strategy, and how workers share a dataset."""

import os

import tensorflow as tf
from absl import app, flags

import tfdist

flags.DEFINE_integer("devices", 0, "Virtual CPU devices to train on without TF_CONFIG. 0: all GPUs, else the CPU.", 0)


def make_strategy() -> tf.distribute.Strategy:
    """One worker of many where TF_CONFIG says so, else the devices of this machine. Call it before anything else."""
    if os.environ.get("TF_CONFIG"):
        return tfdist.MultiWorkerMirroredStrategy()
    devices = flags.FLAGS.devices
    if not devices:
        return tfdist.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return tfdist.MirroredStrategy([f"CPU:{i}" for i in range(devices)])


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that prints and saves."""
    return strategy.extended.should_checkpoint


def batches(dataset: tf.data.Dataset, batch_size: int, seed: int | None = None) -> tf.data.Dataset:
    """Batches of `batch_size` over all workers together, shuffled where a seed is given."""
    rows = int(dataset.cardinality())  # negative if unknown
    if seed is not None and 0 <= rows < batch_size:
        raise app.UsageError(
            f"Training drops what does not fill a batch: of {rows} rows, --batch_size {batch_size} leaves none. Give a "
            "smaller one."
        )
    dataset = dataset.cache()
    if seed is not None:
        # One seed for all workers: each takes its share of the same order, so none is read twice or left out.
        dataset = dataset.shuffle(10_000, seed=seed)
    # Training drops the last rows of an epoch, so that no replica gets fewer than the others.
    dataset = dataset.batch(batch_size, drop_remainder=seed is not None).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False  # Nothing to tune, and TensorFlow may take long to end the tuner.
    return dataset.with_options(options)
