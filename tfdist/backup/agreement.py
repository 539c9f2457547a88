"""How the workers of a run agree: each says something, the chief decides, all hear what was decided."""

import contextlib
import itertools
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist import _tf
from tfdist.errors import BackupError, ClusterError
from tfdist.faults.health import Health
from tfdist.faults.options import options_of

_ASK_SECONDS = 5.0  # Whether a worker is still there, of which nothing was heard.
_LATE = (
    "Worker {own} on {host} waited up to {seconds:g} s for worker {worker} to say how its part of a backup went: "
    "{said}. See the log of worker {worker}."
)
_NOT_COME = (
    "Worker {own} on {host} waited up to {seconds:g} s for worker {worker} to begin a `fit` with BackupAndRestore, as "
    "all do ({said}). See the log of worker {worker}. Give BackupAndRestore on every worker, not on the chief alone; "
    "if all have it, and `on_train_begin` of other callbacks takes longer on worker {worker}, raise "
    "start_timeout_seconds of tfdist.FaultTolerance and timeout_seconds of BackupAndRestore."
)

_made = itertools.count()  # Among several workers: one alone may make more of its own.


class Agreement:
    """Agreements among the workers of a strategy, through TensorFlow's coordination service; none for one worker.

    Make as many on all workers, in the same order: their words are kept apart by number. Those of one worker count not.

    Args:
      strategy: Of the model.
      timeout_seconds: How long to wait for what another worker says.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout_seconds: float):
        extended = strategy.extended
        self.workers: int = getattr(extended, "_num_workers", 1)
        self.own: int = extended._id_in_cluster if self.workers > 1 else 0
        self._health = Health(strategy) if self.workers > 1 else None
        self._timeout_seconds = timeout_seconds
        self._begin_seconds = timeout_seconds
        if self.workers > 1:
            self._begin_seconds = min(timeout_seconds, options_of(strategy).start_timeout_seconds)
        self._prefix = f"tfdist/backup/{next(_made)}" if self.workers > 1 else ""
        self._heard: dict[str, list[str]] = {}
        self._rounds: Counter[str] = Counter()

    @property
    def is_chief(self) -> bool:
        """Whether this worker decides."""
        return self.own == 0

    def begin(self, told: Mapping[str, str]) -> None:
        """Waits until all workers begin, for no longer than they may take to come, and compares what each was told.

        Raises:
          BackupError: If a worker does not come, or was told something else.
        """
        self._settle("fit", dict(told), _compare, self._begin_seconds, _NOT_COME)

    def settle(self, topic: str, said: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Tells the chief something, and returns what it makes of what all have told; JSON both.

        Of one topic, call it in the same order on all workers. What `decide` raises on the chief, all raise.

        Raises:
          BackupError: If a worker is not heard in time or does not answer any more, or the chief could not decide.
        """
        return self._settle(topic, said, decide, self._timeout_seconds, _LATE)

    def _settle(self, topic: str, said: Any, decide: Callable[[list[Any]], Any], seconds: float, fault: str) -> Any:
        if self.workers == 1:
            return decide([said])
        name = f"{self._prefix}/{topic}/{self._rounds[topic]}"
        self._rounds[topic] += 1
        if not self.is_chief:
            self._say(f"{name}/{self.own}", said)
        else:
            try:
                words = [said, *(self._hear(f"{name}/{i}", i, seconds, fault) for i in range(1, self.workers))]
                self._forget(topic, name)
                self._say(f"{name}/decided", {"decided": decide(words)})
            except BaseException as error:
                with contextlib.suppress(tf.errors.OpError):  # those that are left may hear it
                    self._say(f"{name}/decided", {"error": f"{type(error).__name__}: {error}"})
                raise
        # The chief may need all of its time to learn who is missing.
        answer = self._hear(f"{name}/decided", 0, seconds + 2 * _ASK_SECONDS, fault)
        if "error" in answer:
            raise BackupError(f"The chief says: {answer['error']}")
        return answer["decided"]

    def _say(self, key: str, said: Any) -> None:
        _tf.context.context().set_config_key_value(key, json.dumps(said))

    def _hear(self, key: str, worker: int, seconds: float, fault: str) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                patience = max(0.1, min(_ASK_SECONDS, deadline - time.monotonic()))
                return json.loads(_tf.context.context().get_config_key_value(key, round(patience * 1000)))
            except tf.errors.OpError as error:
                if not isinstance(error, tf.errors.DeadlineExceededError) or time.monotonic() >= deadline:
                    said = {"own": self.own, "host": socket.gethostname(), "seconds": seconds, "worker": worker}
                    raise BackupError(fault.format(**said, said=error.message)) from error
            self._check_is_there(worker)

    def _check_is_there(self, worker: int) -> None:
        assert self._health is not None
        try:
            self._health.check(worker)
        except ClusterError as error:
            raise BackupError(
                f"Worker {self.own} on {socket.gethostname()} cannot learn how the part of worker {worker} of a backup "
                f"went: {error}. Start again: training goes on from the newest backup."
            ) from error

    def _forget(self, topic: str, name: str) -> None:
        """Removes what was said in the round before, which all have heard, since all have spoken again."""
        for key in self._heard.get(topic, ()):
            try:
                _tf.context.context().delete_config_key_value(key)
            except tf.errors.OpError as error:
                logging.debug("A word of a former agreement stays: %s", error.message)
        self._heard[topic] = [f"{name}/decided", *(f"{name}/{worker}" for worker in range(1, self.workers))]


def _compare(told: list[Mapping[str, str]]) -> None:
    for worker, own in enumerate(told):
        for name, value in own.items():
            if value != told[0][name]:
                raise BackupError(
                    f"BackupAndRestore is the same on all workers, but got {name}={told[0][name]} on worker 0 and "
                    f"{name}={value} on worker {worker}. Give all the same."
                )
