"""What workers tell each other beside the collectives, through TensorFlow's coordination service."""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist import _tf
from tfdist.errors import ClusterError

__all__ = ["DONE", "OVER", "CoordinationStore"]

DONE = "done"
"""The subject on which a worker says at its end whether it is done."""

OVER = "over"
"""The subject that names the worker whose program was over first, if one is; in worker 0's place, whoever it is."""

_LOOK_SECONDS = 0.5  # For an answer that is there.
_ASK_SECONDS = 5.0  # Whether the program of who is waited for is over.


class CoordinationStore:
    """One place for each worker and subject, that it writes and all can read.

    A call costs a message to worker 0, which keeps it all, less than a millisecond on a quiet network.

    Args:
      worker: Which worker this is.
      workers: How many there are.
    """

    def __init__(self, worker: int, workers: int):
        self.worker = worker
        self.workers = workers

    @property
    def others(self) -> list[int]:
        """All workers but this one."""
        return [worker for worker in range(self.workers) if worker != self.worker]

    def say(self, subject: str, what: Any, worker: int | None = None) -> None:
        """Writes this worker's place; what it said before is gone.

        Args:
          subject: The name of the subject.
          what: What JSON can hold.
          worker: The one that speaks, if it is another that cannot any more.

        Raises:
          tf.errors.OpError: If the service is out of reach.
        """
        self.forget(subject, worker)  # A key can only be written once.
        self.say_once(subject, what, worker)

    def say_once(self, subject: str, what: Any, worker: int | None = None) -> None:
        """The same on a subject of which this worker has said nothing; half the cost.

        Raises:
          tf.errors.OpError: If it has, or the service is out of reach.
        """
        key = _key(subject, self.worker if worker is None else worker)
        _tf.context.context().set_config_key_value(key, json.dumps(what))

    def forget(self, subject: str, worker: int | None = None) -> None:
        """Removes what this worker, or another, has said.

        Raises:
          tf.errors.OpError: If the service is out of reach.
        """
        with contextlib.suppress(tf.errors.NotFoundError):
            _tf.context.context().delete_config_key_value(_key(subject, self.worker if worker is None else worker))

    def hear(self, subject: str, worker: int, timeout_seconds: float) -> Any:
        """What a worker says, as soon as it does.

        Raises:
          tf.errors.OpError: If it says nothing in time, or the service is out of reach.
        """
        milliseconds = max(1, round(timeout_seconds * 1000))  # 0 would be without end.
        return json.loads(_tf.context.context().get_config_key_value(_key(subject, worker), milliseconds))

    def report_error(self, message: str) -> None:
        """Lets the collectives of all workers fail, now and from now on.

        Raises:
          tf.errors.OpError: If the service is out of reach.
        """
        _tf.context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, message)

    def report_loss(self, worker: int, address: str) -> None:
        """Lets collectives fail, since a worker has ended: those of all workers, or these if it was worker 0."""
        message = f"worker {worker} at {address} is gone: its process has ended. Its log may say why."
        if worker == 0:
            self._abort(message)
        else:
            logging.error(message)  # Beside TensorFlow's own error, if that was quicker.
            with contextlib.suppress(tf.errors.OpError):
                self.report_error(message)
            with contextlib.suppress(tf.errors.OpError):
                self.say_over(False, worker)

    def report_silence(self, message: str) -> None:
        """Lets the collectives of this worker fail, since worker 0, that would tell others, does not answer it."""
        self._abort(message)

    def say_over(self, done: bool, worker: int | None = None) -> None:
        """Says that a program is over. Costs three messages.

        Args:
          done: Whether it is done.
          worker: Whose program, if it is another's that cannot say so any more.

        Raises:
          tf.errors.OpError: If the service is out of reach.
        """
        self.say(DONE, done, worker)
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self.say_once(OVER, self.worker if worker is None else worker, 0)

    def absent(self) -> int | None:
        """Another worker whose program is over, done or not; `None` if none is heard of.

        Costs a message, however many workers there are: all that wait may ask worker 0 at once.
        """
        with contextlib.suppress(tf.errors.OpError):
            first = int(self.hear(OVER, 0, _LOOK_SECONDS))
            return first if first != self.worker else None
        return None

    def is_over(self, worker: int) -> bool:
        """Whether a worker's program is over, done or not, as far as that is heard of. Costs a message."""
        try:
            self.hear(DONE, worker, _LOOK_SECONDS)
        except tf.errors.OpError:
            return False
        return True

    def in_vain(self, what: str, absent: int) -> str:
        """Says that this worker waits in vain in `what`, in which all have a part, as the program of one is over."""
        return (
            f"All workers have a part in {what}, but the program of worker {absent} is over, and worker {self.worker} "
            f"on {socket.gethostname()} waits for it. Do it on all workers alike, and only write files `if "
            f"tfdist.cluster.is_chief():`. The log of worker {absent} may say why it ended."
        )

    def last_word(self, subject: str, worker: int, what: str, absent: int) -> Any:
        """What a worker has said, perhaps just before the program of one was over.

        Args:
          subject: The name of the subject.
          worker: Whose word is waited for.
          what: That, in words.
          absent: Whose program is over, which was found out before: who is healthy ends after it has been waited for.

        Raises:
          ClusterError: If it has said nothing.
          tf.errors.OpError: If the service is out of reach.
        """
        try:
            return self.hear(subject, worker, _LOOK_SECONDS)
        except tf.errors.DeadlineExceededError as error:
            raise ClusterError(self.in_vain(what, absent)) from error

    def exchange(self, subject: str, what: Any, timeout_seconds: float) -> Mapping[int, Any]:
        """Says something once in a process, and hears what all say.

        Returns:
          What each worker says; without those that say nothing in time.

        Raises:
          ClusterError: If the program of one is over while another says nothing.
          tf.errors.OpError: If the service is out of reach.
        """
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self.say_once(subject, what)
        heard = {}
        for worker in range(self.workers):
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                heard[worker] = self._await(subject, worker, deadline)
        return heard

    def _abort(self, message: str) -> None:
        logging.error(message)
        _tf.context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)

    def _await(self, subject: str, worker: int, deadline: float) -> Any:
        while (left := deadline - time.monotonic()) > _ASK_SECONDS:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                return self.hear(subject, worker, _ASK_SECONDS)
            absent = self.absent()
            if absent is not None:
                return self.last_word(subject, worker, f"a comparison ({subject})", absent)
        return self.hear(subject, worker, max(0.1, left))


def _key(subject: str, worker: int) -> str:
    return f"tfdist/{subject}/{worker}"
