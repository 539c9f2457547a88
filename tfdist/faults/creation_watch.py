"""Reports within seconds that workers create different variables of a model, where they would wait forever."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf
from absl import logging

from tfdist.errors import ClusterError
from tfdist.faults.coordination_store import CoordinationStore, reported

_RULE = "All workers must make the same variables in the same order"
_POLL_SECONDS = 1.0
_WAIT_SECONDS = 2.0  # Before a waiting worker sends the description of its variable.
_ANSWER_SECONDS = 6.0  # For the descriptions of waiting workers.


class CreationWatch:
    """Compares a new variable of a model with those of the worker's peers, if its creation fails or takes long.

    Reads one number every second. Sends messages only while a creation takes longer than two seconds.

    Args:
      board: The coordination store of this worker.
      name: Name of the strategy that owns the variables, the same on all workers.
    """

    def __init__(self, board: CoordinationStore, name: str) -> None:
        self._board, self._name = board, name
        self._number = 0
        self._making: tuple[tuple[str, str], float] | None = None
        self._has_told = False
        threading.Thread(target=self._watch, name="tfdist-creation-watch", daemon=True).start()

    @contextlib.contextmanager
    def making(self, compared: str, shown: str) -> Iterator[None]:
        """Watches the block, which creates one variable: compares it with the peers' if it fails or takes long.

        Args:
          compared: The variable's type, shape and creator, which must be equal on all workers.
          shown: The same for an error, with the variable's name. Keras numbers names across all models of a process, so
            names may differ between workers.

        Raises:
          ClusterError: If the creation fails, and a peer creates a different variable at this point.
        """
        self._number += 1
        described = compared, shown
        self._making = described, time.monotonic()
        try:
            yield
        except tf.errors.OpError as error:
            message = reported(error, f"{_RULE}, but number") or self._difference(described, _ANSWER_SECONDS)
            if message is not None:
                raise ClusterError(message) from error
            raise
        finally:
            self._making = None

    def _watch(self) -> None:
        while not self._has_told:
            time.sleep(_POLL_SECONDS)
            making = self._making
            if making is None or time.monotonic() - making[1] < _WAIT_SECONDS:
                continue
            message = self._difference(making[0], _POLL_SECONDS)
            if message is not None and making is self._making:
                self._has_told = True
                logging.error(message)
                with contextlib.suppress(tf.errors.OpError):
                    self._board.report_error(message)  # Otherwise the broadcast would wait forever.

    def _difference(self, described: tuple[str, str], timeout_seconds: float) -> str | None:
        try:
            said = self._board.exchange(f"{self._name}-{self._number}", described, timeout_seconds)
        except (tf.errors.OpError, ClusterError):  # The job ends for another reason.
            return None
        return unlike(self._number, said, f"worker {self._board.worker} on {socket.gethostname()}")


def unlike(number: int, said: Mapping[int, Sequence[str]], here: str) -> str | None:
    """Describes how the variables that workers create at the same point differ; `None` if the variables are equal.

    Args:
      number: The position of the variable among the creations of each worker.
      said: By worker, two texts for the variable: one to compare, one for the error.
      here: A description of this worker.
    """
    firsts: dict[str, tuple[int, str]] = {}
    for worker, (compared, shown) in sorted(said.items()):
        firsts.setdefault(compared, (worker, shown))
    if len(firsts) < 2:
        return None
    named = ", ".join(f"worker {worker} makes {shown}" for worker, shown in firsts.values())
    return (
        f"{_RULE}, but number {number} differs: {named}. This is {here}. "
        "Build the same layers, of the same sizes, and the same optimizer on all workers."
    )
