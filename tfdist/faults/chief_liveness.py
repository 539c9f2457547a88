"""A chief that is frozen or cut off is named. TensorFlow's heartbeats to it run out later, and name nobody.

It keeps TensorFlow's coordination service, which tells by name when another is silent.
"""

import atexit
import threading
from collections.abc import Mapping, Sequence

from tfdist.errors import ClusterError
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.peer_health import PeerHealth
from tfdist.faults.peer_liveness import PeerLiveness

__all__ = ["watch_chief"]

_POLL_PART, _SILENCE_PART = 0.1, 0.8  # of the seconds for which heartbeats may fail: so this is told before
_STOP_SECONDS = 0.1


def watch_chief(
    jobs: Mapping[str, Sequence[str]], lifelines: PeerLiveness, board: CoordinationStore, timeout_seconds: float
) -> None:
    """Asks worker 0 again and again, in a thread, whether it is there; if it is not, collectives fail with its name.

    Costs worker 0 a message, ten times in that time. TensorFlow's threads answer, whatever holds up those of Python.

    Args:
      jobs: The cluster: addresses of tasks by job.
      lifelines: Which know if it has ended, and come to know that it is silent.
      board: Of this worker.
      timeout_seconds: For which heartbeats may fail.
    """
    health = PeerHealth(jobs, _SILENCE_PART * timeout_seconds)
    stopping = threading.Event()

    def watch() -> None:
        while not (stopping.wait(_POLL_PART * timeout_seconds) or 0 in lifelines.ended):
            try:
                health.check(0)
            except ClusterError as error:
                if 0 not in lifelines.ended:
                    lifelines.silent.add(0)
                    board.report_silence(str(error))
                return

    def stop() -> None:  # before a message is waited for without end, and before TensorFlow takes its runtime apart
        stopping.set()
        while thread.is_alive() and 0 not in lifelines.ended:
            thread.join(_STOP_SECONDS)

    thread = threading.Thread(target=watch, name="tfdist-silence", daemon=True)
    thread.start()
    atexit.register(stop)
