"""Exchanges of eager steps: replicas run one after another, and come together where they exchange."""

import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies.step import Step

_MOST_BYTES = 1 << 13  # Limit of the text in which a worker names the exchange of its replicas.


def merged(step: Step, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of the strategy and the arguments of all replicas, for replicas that run one after another.

    If a model has divided weights, replicas first compare `what` they are about to exchange. Each replica runs its own
    Python code, so a branch on values may read other weights. The exchange would put parts of different weights
    together. Costs an exchange of one number between workers.

    Args:
      step: The step of the replica.
      what: Says in an error message what the replica is about to do, such as "gather the weight 'kernel'".
      function: A function of the strategy and the arguments, each with the values of all replicas of this worker.
      *args: The arguments of this replica.

    Raises:
      ValueError: On all replicas, if they are about to exchange different things.
    """
    context = tf.distribute.get_replica_context()
    with step.losses_kept():
        if tf.executing_eagerly() and context.strategy.extended.divides_weights:
            context.merge_call(_check_alike, (what,))
        return context.merge_call(function, args)


def _check_alike(strategy: Any, what: Any) -> None:
    extended = strategy.extended
    local = [str(each) for each in strategy.experimental_local_results(what)]
    if len(local) == 1:  # All replicas of this worker have said the same.
        local *= len(extended.worker_devices)
    said = "\n".join(local)
    checksums = extended.of_all_workers(zlib.crc32(said.encode()))
    if len(set(local)) == 1 and len(set(checksums)) == 1:
        return
    numbers = list(said.encode()[:_MOST_BYTES].ljust(_MOST_BYTES))
    everyone = "\n".join(bytes(each).decode(errors="ignore").strip() for each in extended.of_all_workers(numbers))
    first, *others = everyone.split("\n")
    replica, other = next((i, each) for i, each in enumerate(others, start=1) if each != first)
    raise ValueError(
        f"All replicas must read the same divided weights in the same order, but in an eager step replica 0 is about "
        f"to {first}, and replica {replica} to {other}. A Python `if` on values may take another branch on each "
        "replica. Use the same layers on all replicas, compile without `run_eagerly=True`, or leave "
        "model_sharding='parameters' and ShardedEmbedding out."
    )
