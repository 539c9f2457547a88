"""Checks whether a peer still answers, for code that waits without a collective and so gets no error of its own."""

import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.errors import WorkerLostError
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.fault_deadlines import options_of

_PAUSE_SECONDS = 1.0


class PeerProbe:
    """Checks that workers of a cluster still answer, while this worker waits for one of them.

    Args:
      jobs: The cluster: addresses of tasks by job.
      silence_seconds: How long a worker may be silent.
      board: The coordination store, to ask worker 0 by a message that lets this worker's Python threads go on. Without
        it, and for other workers, a check stops them until the worker answers: on a distant one for a round trip.
    """

    def __init__(
        self, jobs: Mapping[str, Sequence[str]], silence_seconds: float, board: CoordinationStore | None = None
    ):
        self._board = board
        tasks = [(job, i) for job in ("chief", "worker") for i in range(len(jobs.get(job, ())))]
        self._tasks = [f"/job:{job}/replica:0/task:{i}" for job, i in tasks]
        self._names = [f"worker {worker} at {jobs[job][i]}" for worker, (job, i) in enumerate(tasks)]
        self._silence_seconds = silence_seconds

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "PeerProbe":
        """Returns a probe for the workers of a strategy with several workers."""
        return cls(strategy.extended._cluster_spec.as_dict(), options_of(strategy).heartbeat_timeout_seconds)

    def check(self, worker: int) -> None:
        """Returns if a worker answers, else raises. TensorFlow answers even while the worker's threads compute.

        Raises:
          ClusterError: If the worker does not answer for `silence_seconds`.
        """
        deadline = time.monotonic() + self._silence_seconds
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                self._ask(worker, left)
                return
            except tf.errors.OpError as error:
                if time.monotonic() >= deadline:
                    said = (error.message.strip().splitlines() or [""])[0]
                    raise WorkerLostError(
                        f"{self._names[worker]} has not answered for {self._silence_seconds:g} s: it has ended, is "
                        f"frozen, or cannot be reached over the network ({said}). See its log"
                    ) from error
            time.sleep(min(_PAUSE_SECONDS, left))

    def _ask(self, worker: int, seconds: float) -> None:
        if worker == 0 and self._board is not None:
            self._board.await_life(seconds)
        else:
            tf_internals.context.context().check_collective_ops_peer_health(self._tasks[worker], round(seconds * 1000))
