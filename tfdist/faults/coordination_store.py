"""A key-value store for messages between workers outside the collectives, in TensorFlow's coordination service."""

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist._compat import tf_internals
from tfdist.errors import ClusterError

DONE = "done"
"""The subject under which a worker writes, at its end, whether it is done."""

OVER = "over"
"""The subject that names the first worker to end its program. Every worker writes it under worker 0's key."""

_LIFE = "life"  # Worker 0 writes a value once, which others read to see whether it answers.
_LOOK_SECONDS = 0.5  # To read a value that exists already.
_ASK_SECONDS = 5.0  # Between two checks whether a peer's program has ended.


class CoordinationStore:
    """Holds one value for each subject and worker. Each worker writes its own values, and all workers can read them.

    All calls raise `tf.errors.OpError` if the coordination service is out of reach. Each call costs a message to worker
    0, which hosts the store: less than a millisecond on a quiet network.

    Args:
      worker: Index of this worker.
      workers: Number of workers; 1 if this worker trains alone, even if others run beside it.
    """

    def __init__(self, worker: int, workers: int):
        self.worker = worker
        self.workers = workers

    @property
    def others(self) -> list[int]:
        """The indices of this worker's peers, whose values it can read."""
        return [worker for worker in range(self.workers) if worker != self.worker] if self.workers > 1 else []

    def say(self, subject: str, what: Any, worker: int | None = None) -> None:
        """Writes a JSON value of this worker, or of a lost `worker`, for a subject, replacing an earlier value."""
        self.forget(subject, worker)  # A key can only be written once.
        self.say_once(subject, what, worker)

    def say_once(self, subject: str, what: Any, worker: int | None = None) -> None:
        """Writes a value like `say` at half the cost, for a subject without an earlier value of this worker.

        Raises:
          tf.errors.OpError: If an earlier value exists.
        """
        key = _key(subject, self.worker if worker is None else worker)
        tf_internals.context.context().set_config_key_value(key, json.dumps(what))

    def forget(self, subject: str, worker: int | None = None) -> None:
        """Removes the stored value of this worker, or of `worker`, for a subject."""
        with contextlib.suppress(tf.errors.NotFoundError):
            tf_internals.context.context().delete_config_key_value(
                _key(subject, self.worker if worker is None else worker)
            )

    def hear(self, subject: str, worker: int, timeout_seconds: float) -> Any:
        """Waits until a worker has stored a value for a subject, and returns the value.

        Raises:
          tf.errors.OpError: If no value comes in time.
        """
        milliseconds = max(1, round(timeout_seconds * 1000))  # 0 would wait forever.
        return json.loads(tf_internals.context.context().get_config_key_value(_key(subject, worker), milliseconds))

    def show_life(self) -> None:
        """On worker 0: lets peers call `await_life`."""
        # An error means that it is written already, or that a worker is lost, which the next exchange tells.
        with contextlib.suppress(tf.errors.OpError):
            self.say_once(_LIFE, True)

    def await_life(self, timeout_seconds: float) -> None:
        """Returns once worker 0 answers, after it has called `show_life`. Its busy Python threads delay no answer.

        The Python threads of this process go on meanwhile. TensorFlow's own check of a peer stops them.

        Raises:
          tf.errors.OpError: If no answer comes in time.
        """
        self.hear(_LIFE, 0, timeout_seconds)

    def report_error(self, message: str) -> None:
        """Makes all present and future collectives of all workers fail, so that no worker waits forever."""
        tf_internals.context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, message)

    def report_loss(self, worker: int, address: str) -> None:
        """Makes all workers' collectives fail after a worker has ended; only this worker's, if worker 0 has ended."""
        message = f"worker {worker} at {address} is gone: its process ended. See its log for the reason."
        if worker == 0:
            self.abort(message)
        else:
            logging.error(message)  # TensorFlow's own error may have come first.
            with contextlib.suppress(tf.errors.OpError):
                self.report_error(message)
            with contextlib.suppress(tf.errors.OpError):
                self.say_over(False, worker)

    def say_over(self, done: bool, worker: int | None = None) -> None:
        """Stores that a worker's program has ended, so that peers stop waiting for it. Costs three messages.

        `done` means without a failure. `worker` is the worker to write for, if it is lost; this worker if None.
        """
        self.say(DONE, done, worker)
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self.say_once(OVER, self.worker if worker is None else worker, 0)

    def absent(self) -> int | None:
        """Returns the first peer to end its program, done or not; `None` if no end is known.

        Costs one message for any number of workers, since all waiting workers may ask worker 0 at the same time.
        """
        with contextlib.suppress(tf.errors.OpError):
            first = int(self.hear(OVER, 0, _LOOK_SECONDS))
            return first if first != self.worker else None
        return None

    def is_over(self, worker: int) -> bool:
        """Returns whether a worker's program is known to have ended, done or not. Costs a message."""
        try:
            self.hear(DONE, worker, _LOOK_SECONDS)
        except tf.errors.OpError:
            return False
        return True

    def in_vain(self, what: str, absent: int) -> str:
        """Returns the error text that this worker waits in vain in `what`, since the program of `absent` has ended."""
        return (
            f"All workers must take part in {what}, but the program of worker {absent} has ended while worker "
            f"{self.worker} on {socket.gethostname()} waits for it. Make the same calls on all workers, and put only "
            f"code that writes files under `if tfdist.cluster.is_chief():`. See the log of worker {absent}."
        )

    def last_word(self, subject: str, worker: int, what: str, absent: int) -> Any:
        """Returns a worker's value if it was stored just before a program ended. Otherwise raises: none will come.

        Args:
          subject: The name of the subject.
          worker: The worker that should have written the value.
          what: A description of the exchange, for the error.
          absent: The worker that is known to have ended. A healthy worker writes its value before it ends.

        Raises:
          ClusterError: If the worker has written no value.
        """
        try:
            return self.hear(subject, worker, _LOOK_SECONDS)
        except tf.errors.DeadlineExceededError as error:
            raise ClusterError(self.in_vain(what, absent)) from error

    def exchange(
        self, subject: str, what: Any, timeout_seconds: float, workers: Iterable[int] | None = None
    ) -> Mapping[int, Any]:
        """Stores this worker's value for a subject, only once in a process, and reads those of `workers`, or of all.

        Returns:
          The values by worker, without the workers that write none in time.

        Raises:
          ClusterError: If a worker's program has ended while a value is still missing.
        """
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self.say_once(subject, what)
        heard = {}
        for worker in range(self.workers) if workers is None else workers:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                heard[worker] = self._await(subject, worker, deadline)
        return heard

    def abort(self, message: str) -> None:
        """Makes only this worker's collectives fail, if worker 0, which informs the peers, is gone or silent."""
        logging.error(message)
        tf_internals.context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)

    def _await(self, subject: str, worker: int, deadline: float) -> Any:
        while (left := deadline - time.monotonic()) > _ASK_SECONDS:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                return self.hear(subject, worker, _ASK_SECONDS)
            absent = self.absent()
            if absent is not None:
                return self.last_word(subject, worker, f"a comparison ({subject})", absent)
        return self.hear(subject, worker, max(0.1, left))


def reported(error: Exception, beginning: str) -> str | None:
    """Returns the message with this beginning that a peer gave to `report_error`, if it has caused an error."""
    _, begun, rest = str(error).partition(beginning)
    return f"{begun}{rest}".split(" [type.googleapis.com")[0].splitlines()[0] if begun else None


def _key(subject: str, worker: int) -> str:
    return f"tfdist/{subject}/{worker}"
