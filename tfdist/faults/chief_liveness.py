"""Detects a frozen or disconnected chief (worker 0), sooner than TensorFlow's heartbeats, whose error names no worker.

The chief hosts TensorFlow's coordination service, which names any other silent worker.
"""

import atexit
import threading
from collections.abc import Mapping, Sequence

from tfdist.errors import ClusterError
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.peer_liveness import PeerLiveness
from tfdist.faults.peer_probe import PeerProbe

_POLL_PART, _SILENCE_PART = 0.1, 0.8  # Fractions of the heartbeat timeout: this error comes first.
_STOP_SECONDS = 0.1


def watch_chief(
    jobs: Mapping[str, Sequence[str]], liveness: PeerLiveness, board: CoordinationStore, timeout_seconds: float
) -> None:
    """Checks worker 0 regularly in a thread; if worker 0 does not answer, collectives fail with an error that names it.

    Costs worker 0 ten messages per timeout. TensorFlow's threads answer, even while Python's threads are busy. Worker 0
    calls `CoordinationStore.show_life` meanwhile.

    Args:
      jobs: The cluster: addresses of tasks by job.
      liveness: The liveness connections. They show whether worker 0 has ended, and record that it is silent.
      board: The coordination store of this worker.
      timeout_seconds: How long heartbeats may fail.
    """
    health = PeerProbe(jobs, _SILENCE_PART * timeout_seconds, board)
    stopping = threading.Event()

    def watch() -> None:
        while not (stopping.wait(_POLL_PART * timeout_seconds) or 0 in liveness.ended):
            try:
                health.check(0)
            except ClusterError as error:
                if 0 not in liveness.ended:
                    liveness.silent.add(0)
                    board.abort(str(error))
                return

    def stop() -> None:  # Must precede exit handlers that could wait forever for worker 0, and TensorFlow's shutdown.
        stopping.set()
        while thread.is_alive() and 0 not in liveness.ended:
            thread.join(_STOP_SECONDS)

    thread = threading.Thread(target=watch, name="tfdist-silence", daemon=True)
    thread.start()
    atexit.register(stop)
