"""The rows that a worker reads in a job that goes on without lost workers, where TensorFlow knows only this worker."""

from typing import Any

import tensorflow as tf

from tfdist.strategies import auto_shard_policy


def check_sharding(sharding: Any, replicas: int) -> None:
    """Checks that each of the job's replicas has rows of each batch of a `BalancedSharding`.

    Raises:
      ValueError: If the last batch of an epoch may have too few, or the batch size may change.
    """
    if sharding.batch_size_range is not None:
        raise ValueError(
            "With tolerate_lost_workers the workers cannot agree on another batch size, but the BalancedSharding has "
            f"batch_size_range={sharding.batch_size_range!r}. Leave it out."
        )
    plan = sharding.plan
    rows = plan.rows(plan.steps_per_epoch - 1)
    if rows < replicas:
        raise ValueError(
            f"With tolerate_lost_workers each of the {replicas} replicas needs rows of each batch, but the last batch "
            f"of an epoch has {rows}. Give BalancedSharding drop_remainder=True."
        )


def own_rows(dataset: tf.data.Dataset, worker: int, workers: int) -> tf.data.Dataset:
    """Returns the batches of a dataset that all workers read, with the rows of one worker.

    Raises:
      ValueError: If workers would read by files, which is not possible here.
    """
    if auto_shard_policy.is_own_of_each(dataset):
        if dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF:
            return dataset
        raise ValueError(
            "With tolerate_lost_workers each worker reads its rows of each batch (AutoShardPolicy AUTO or DATA) or a "
            "dataset of its own (OFF), but the dataset has the policy FILE or HINT. Set one of the others."
        )

    def own(*batch: Any) -> Any:
        rows = tf.shape(tf.nest.flatten(batch)[0])[0]
        # In a batch with fewer rows than workers, some workers train on the same row.
        first = tf.minimum(rows * worker // workers, rows - 1)
        last = tf.maximum(rows * (worker + 1) // workers, first + 1)
        mine = tf.nest.map_structure(lambda leaf: leaf[first:last], batch)
        return mine[0] if len(mine) == 1 else mine

    return dataset.map(own, num_parallel_calls=tf.data.AUTOTUNE)
