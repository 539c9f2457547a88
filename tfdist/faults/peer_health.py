"""Whether another worker still answers: who waits for its word asks, as only collectives are told of its end."""

import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist import _tf
from tfdist.errors import WorkerLostError
from tfdist.faults.fault_tolerance import options_of

__all__ = ["PeerHealth"]

_PAUSE_SECONDS = 1.0


class PeerHealth:
    """Asks the workers of a cluster whether they are there.

    Args:
      jobs: The cluster: addresses of tasks by job.
      silence_seconds: For how long one may be silent.
    """

    def __init__(self, jobs: Mapping[str, Sequence[str]], silence_seconds: float):
        tasks = [(job, i) for job in ("chief", "worker") for i in range(len(jobs.get(job, ())))]
        self._tasks = [f"/job:{job}/replica:0/task:{i}" for job, i in tasks]
        self._names = [f"worker {worker} at {jobs[job][i]}" for worker, (job, i) in enumerate(tasks)]
        self._silence_seconds = silence_seconds

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "PeerHealth":
        """Asks the workers of a strategy, of which there are several."""
        return cls(strategy.extended._cluster_spec.as_dict(), options_of(strategy).heartbeat_timeout_seconds)

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
                    raise WorkerLostError(
                        f"{self._names[worker]} does not answer for {self._silence_seconds:g} s: it has ended, is "
                        f"frozen, or the network between is cut ({said}). See its log"
                    ) from error
            time.sleep(min(_PAUSE_SECONDS, left))
