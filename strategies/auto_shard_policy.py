"""The AutoShardPolicy of a dataset: which rows each worker reads, and in how many batches."""

from typing import Any

import tensorflow as tf

from tfdist._compat import dataset_internals
from tfdist.strategies.tensor_origin import reads_files

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
_READ_BY_ALL = AutoShardPolicy.AUTO, AutoShardPolicy.DATA


def is_read_by_all(dataset: tf.data.Dataset) -> bool:
    """Whether each worker reads the whole dataset and keeps its rows of each batch: policy AUTO or DATA."""
    return _policy_of(dataset) in _READ_BY_ALL


def is_split_by_rows(dataset: tf.data.Dataset) -> bool:
    """Whether, in a custom loop, each worker reads the whole dataset and keeps its rows of each batch."""
    if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly():
        return False
    policy = _policy_of(dataset)
    return policy == AutoShardPolicy.DATA or (policy == AutoShardPolicy.AUTO and not reads_files(dataset))


def alike_on_workers(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` with options by which all workers read the whole dataset in the same order.

    By default TensorFlow gives each worker some of the files, if there are files. Global batches then differ from those
    of one device, and fewer files than workers are an error. Workers that read in different orders
    (`deterministic=False`) would take some rows twice and others never.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    options.deterministic = True
    return dataset.with_options(options)


def gives_all_replicas_a_part(dataset: tf.data.Dataset) -> bool:
    """Whether each batch has a part for each replica, if all workers read the whole dataset: all then end together.

    TensorFlow divides batches of unknown sizes into parts that may be empty. If it knows the batch size of a dataset, a
    short last batch has parts for the first replicas only.
    """
    batch_size = int(tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset)))
    shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in tf.nest.flatten(dataset.element_spec)]
    has_static_rows = all(shape.rank and shape[0] is not None for shape in shapes)
    return batch_size < 0 or has_static_rows


def is_own_of_each(dataset: tf.data.Dataset) -> bool:
    """Whether each worker reads rows that its peers do not read: policy OFF, FILE or HINT."""
    return isinstance(dataset, tf.data.Dataset) and _policy_of(dataset) not in _READ_BY_ALL


def _policy_of(dataset):
    return dataset.options().experimental_distribute.auto_shard_policy


def divided_one_by_one(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` in a form that makes TensorFlow divide each batch separately.

    TensorFlow then takes as many steps for each batch as there are workers. Without the added `map`, it may join the
    rest of one batch with the next batch, and the number of steps is unknown.
    """
    is_tuple = type(dataset.element_spec) is tuple
    return dataset.map(tf.autograph.experimental.do_not_convert(lambda *batch: batch if is_tuple else batch[0]))


def batches_of_own(dataset: tf.data.Dataset, workers: int) -> int:
    """The number of batches that this worker takes of its own rows; negative if unknown or infinite.

    Under OFF a step takes a part of a batch, since batch_size counts the rows of all workers. TensorFlow assigns files
    to workers without telling how many rows a worker gets. `dataset` must be a result of `divided_one_by_one`.
    """
    batches = int(dataset.cardinality())
    if _policy_of(dataset) == AutoShardPolicy.OFF:
        return batches * workers if batches > 0 else batches
    return tf.data.UNKNOWN_CARDINALITY


def end_for_all(distributed: Any, dataset: tf.data.Dataset, batches: int) -> None:
    """Makes Keras read a dataset with separate rows on each worker until no worker has rows left.

    `batches` is the largest number of batches of a worker; see `batches_of_own`.
    """
    if _policy_of(dataset) == AutoShardPolicy.HINT:
        dataset_internals.end_when_all_have_ended(distributed)
    dataset_internals.set_cardinality(distributed, batches)


def unordered(dataset: tf.data.Dataset) -> ValueError:
    """The error for `predict` on a dataset with separate rows on each worker."""
    policy = _policy_of(dataset).name
    return ValueError(
        "`predict` returns rows in the order of the data, so all workers must read the same data, but under "
        f"AutoShardPolicy.{policy} each worker reads its own. Leave the policy out, or set AutoShardPolicy.DATA in the "
        "tf.data.Options of the dataset: each worker then predicts its part of each batch. Or call `model(x)` on each "
        "worker with its own rows."
    )
