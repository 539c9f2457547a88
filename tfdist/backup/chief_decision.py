"""Joint decisions of all workers on backups: each worker sends a message, the chief decides, all read the decision."""

import contextlib
import functools
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist._compat import tf_internals
from tfdist.errors import CHIEF_SAYS, BackupError, ClusterError
from tfdist.events.phase_names import AGREEING
from tfdist.faults import beside_steps
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.fault_deadlines import options_of
from tfdist.faults.peer_probe import PeerProbe

_ASK_SECONDS = 5.0  # Interval of the checks whether a silent worker is alive.
_LOOK_SECONDS = 0.5  # Timeout for reading a value that exists.
_LATE = (
    "{who} waited up to {seconds:g} s for worker {worker} to report on its part of a backup. See the log of worker "
    "{worker}."
)
_NOT_COME = (
    "{who} waited up to {seconds:g} s for worker {worker} to begin a `fit` with BackupAndRestore, as all workers must. "
    "See the log of worker {worker}. Give BackupAndRestore on every worker, not on the chief alone; "
    "if all have it, and `on_train_begin` of other callbacks takes longer on worker {worker}, raise "
    "start_timeout_seconds of tfdist.FaultTolerance and timeout_seconds of BackupAndRestore."
)

_made = itertools.count()  # Counts agreements of several workers. A single worker may make any number.


class ChiefDecision:
    """Lets the chief decide for all workers, from messages in the coordination store. One worker decides alone.

    Create the same number of these objects in the same order on all workers, because their messages differ by number.

    Args:
      strategy: The strategy of the model.
      timeout_seconds: How long to wait for the message of another worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout_seconds: float):
        extended = strategy.extended
        self.workers = tf_internals.number_of_workers(strategy)
        self.own: int = extended._id_in_cluster if self.workers > 1 else 0
        self._health = PeerProbe.of(strategy) if self.workers > 1 else None
        self._timeout_seconds = timeout_seconds
        self._begin_seconds = timeout_seconds
        if self.workers > 1:
            self._begin_seconds = min(timeout_seconds, options_of(strategy).start_timeout_seconds)
        self._board = CoordinationStore(self.own, self.workers)
        self._prefix = f"backup/{next(_made)}" if self.workers > 1 else ""
        self._former: dict[str, str] = {}
        self._rounds: Counter[str] = Counter()

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief, which decides on backups for all workers."""
        return self.own == 0

    @property
    def who(self) -> str:
        """The name of this worker for errors, such as "Worker 1 on node2"."""
        return f"Worker {self.own} on {socket.gethostname()}"

    def begin(self, told: Mapping[str, str]) -> None:
        """Waits, at most for the start timeout, until all workers begin a backed-up `fit` with equal arguments.

        Raises:
          BackupError: If a worker does not begin in time, or has other arguments.
        """
        with beside_steps.section(AGREEING):
            self._settle("fit", dict(told), _compare, self._begin_seconds, _NOT_COME)

    def settle(self, topic: str, said: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Sends a message to the chief, and returns the chief's decision on the messages of all workers. Both are JSON.

        For each topic, call it in the same order on all workers. If `decide` raises on the chief, all workers raise.

        Raises:
          BackupError: If a worker sends no message in time or is unresponsive, or if the chief could not decide.
        """
        if topic == "save":  # In a thread of its own, while the training thread trains.
            return self._settle(topic, said, decide, self._timeout_seconds, _LATE)
        with beside_steps.section(AGREEING):
            return self._settle(topic, said, decide, self._timeout_seconds, _LATE)

    def _settle(self, topic: str, said: Any, decide: Callable[[list[Any]], Any], seconds: float, fault: str) -> Any:
        if self.workers == 1:
            return decide([said])
        subject = f"{self._prefix}/{topic}/{self._rounds[topic]}"
        self._rounds[topic] += 1
        if not self.is_chief:
            self._board.say_once(subject, said)
        else:
            try:
                words = [said, *self._hear_all(subject, seconds, fault)]
                self._forget(topic, subject)
                self._board.say_once(_decided(subject), {"decided": decide(words)})
            except BaseException as error:
                with contextlib.suppress(tf.errors.OpError):  # the remaining workers may read it
                    self._board.say_once(_decided(subject), {"error": f"{type(error).__name__}: {error}"})
                raise
        answer = self._hear_decided(subject, seconds, fault)
        if "error" in answer:
            raise BackupError(f"{CHIEF_SAYS}: {answer['error']}")
        return answer["decided"]

    def _hear_all(self, subject: str, seconds: float, fault: str) -> list[Any]:
        """Returns the messages of the other workers, on the chief. Meanwhile announces to them that the chief waits."""
        deadline = time.monotonic() + seconds

        def meanwhile() -> float:
            with contextlib.suppress(tf.errors.AlreadyExistsError):
                self._board.say_once(_waits(subject), True)
            return deadline

        named = functools.partial(fault.format, who=self.who, seconds=seconds)
        return [
            self._hear(subject, worker, deadline, meanwhile, named(worker=worker)) for worker in range(1, self.workers)
        ]

    def _hear_decided(self, subject: str, seconds: float, fault: str) -> Any:
        """Returns the chief's decision. Waits twice as long once the chief announces that it waits for workers."""
        start, patience = time.monotonic(), seconds + 2 * _ASK_SECONDS

        def meanwhile() -> float:
            try:
                self._board.hear(_waits(subject), 0, _LOOK_SECONDS)
            except tf.errors.OpError:
                return start + patience
            return start + 2 * patience

        named = fault.format(who=self.who, seconds=seconds, worker=0)
        return self._hear(_decided(subject), 0, start + patience, meanwhile, named)

    def _hear(self, subject: str, worker: int, deadline: float, meanwhile: Callable[[], float], fault: str) -> Any:
        """Returns a worker's message. Raises the error `fault` after the deadline, which `meanwhile` may extend."""
        while True:
            try:
                return self._board.hear(subject, worker, max(0.1, min(_ASK_SECONDS, deadline - time.monotonic())))
            except tf.errors.DeadlineExceededError as error:
                deadline = meanwhile()
                if time.monotonic() >= deadline:
                    raise BackupError(f"{fault} ({error.message})") from error
            except tf.errors.OpError as error:
                raise BackupError(f"{fault} ({error.message})") from error
            self._check_answers(worker)
            if self._board.is_over(worker):
                try:
                    return self._board.last_word(subject, worker, "a backup", worker)
                except ClusterError as error:
                    raise BackupError(str(error)) from error

    def _check_answers(self, worker: int) -> None:
        assert self._health is not None
        try:
            self._health.check(worker)
        except ClusterError as error:
            raise BackupError(
                f"{self.who} cannot learn the result of worker {worker} in a backup: {error}. Start again: training "
                "continues from the newest backup."
            ) from error

    def _forget(self, topic: str, subject: str) -> None:
        """Removes the stored messages of the last decision. All workers have read them, since all sent new ones."""
        former, self._former[topic] = self._former.get(topic), subject
        if former is not None:
            words = [(former, worker) for worker in range(1, self.workers)]
            for said, worker in [(_decided(former), 0), (_waits(former), 0), *words]:
                try:
                    self._board.forget(said, worker)
                except tf.errors.OpError as error:
                    logging.debug("A message of an earlier agreement stays: %s", error.message)


def _decided(subject: str) -> str:
    return f"{subject}/decided"


def _waits(subject: str) -> str:
    """Returns the subject under which the chief announces that it waits for other workers, so that all wait longer."""
    return f"{subject}/waits"


def _compare(told: list[Mapping[str, str]]) -> None:
    for worker, own in enumerate(told):
        for name, value in own.items():
            if value != told[0][name]:
                raise BackupError(
                    f"BackupAndRestore must be the same on all workers, but got {name}={told[0][name]} on worker 0 and "
                    f"{name}={value} on worker {worker}. Give the same value on all workers."
                )
