"""Whether another worker still answers: who waits for its word asks, as only collectives are told of its end."""

import time

import tensorflow as tf

from tfdist import _tf
from tfdist.errors import ClusterError
from tfdist.faults.options import options_of

__all__ = ["Health"]

_PAUSE_SECONDS = 1.0


class Health:
    """Asks the workers of a strategy whether they are there.

    Args:
      strategy: Of several workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        spec = strategy.extended._cluster_spec
        jobs = [job for job in ("chief", "worker") if job in spec.jobs]
        self._tasks = [f"/job:{job}/replica:0/task:{i}" for job in jobs for i in range(spec.num_tasks(job))]
        self._silence_seconds = options_of(strategy).heartbeat_timeout_seconds

    def check(self, worker: int) -> None:
        """Returns if a worker answers. Its threads need not: also one that computes for long is there.

        Raises:
          ClusterError: If it does not for as long as heartbeats may fail.
        """
        deadline = time.monotonic() + self._silence_seconds
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                _tf.context.context().check_collective_ops_peer_health(self._tasks[worker], round(left * 1000))
                return
            except tf.errors.OpError as error:
                if time.monotonic() >= deadline:
                    said = (error.message.strip().splitlines() or [""])[0]
                    raise ClusterError(
                        f"worker {worker} does not answer for {self._silence_seconds:g} s: it has ended, is frozen, or "
                        f"the network between is cut ({said}). See its log"
                    ) from error
            time.sleep(min(_PAUSE_SECONDS, left))
