"""How the workers of a run agree: each says something, the chief decides, all hear what was decided."""

import itertools
import json
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist import _tf
from tfdist.errors import BackupError

_made = itertools.count()


class Agreement:
    """Agreements among the workers of a strategy, through TensorFlow's coordination service; none for one worker.

    Make as many on all workers, in the same order: their words are kept apart by number.

    Args:
      strategy: Of the model.
      timeout_seconds: How long to wait for what another worker says.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout_seconds: float):
        extended = strategy.extended
        self.workers: int = getattr(extended, "_num_workers", 1)
        self.own: int = extended._id_in_cluster if self.workers > 1 else 0
        self._timeout_seconds = timeout_seconds
        self._prefix = f"tfdist/backup/{next(_made)}"
        self._heard: dict[str, list[str]] = {}
        self._rounds: Counter[str] = Counter()

    @property
    def is_chief(self) -> bool:
        """Whether this worker decides."""
        return self.own == 0

    def settle(self, topic: str, said: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Tells the chief something, and returns what it makes of what all have told; JSON both.

        Of one topic, call it in the same order on all workers. What `decide` raises on the chief, all raise.

        Raises:
          BackupError: If a worker is not heard in time, or the chief could not decide.
        """
        if self.workers == 1:
            return decide([said])
        name = f"{self._prefix}/{topic}/{self._rounds[topic]}"
        self._rounds[topic] += 1
        if not self.is_chief:
            self._say(f"{name}/{self.own}", said)
        else:
            words = [said, *(self._hear(f"{name}/{worker}", worker) for worker in range(1, self.workers))]
            self._forget(topic, name)
            try:
                self._say(f"{name}/decided", {"decided": decide(words)})
            except BaseException as error:
                self._say(f"{name}/decided", {"error": f"{type(error).__name__}: {error}"})
                raise
        answer = self._hear(f"{name}/decided", 0)
        if "error" in answer:
            raise BackupError(f"The chief says: {answer['error']}")
        return answer["decided"]

    def _say(self, key: str, said: Any) -> None:
        _tf.context.context().set_config_key_value(key, json.dumps(said))

    def _hear(self, key: str, worker: int) -> Any:
        try:
            return json.loads(_tf.context.context().get_config_key_value(key, int(self._timeout_seconds * 1000)))
        except tf.errors.OpError as error:
            raise BackupError(
                f"Worker {self.own} on {socket.gethostname()} waited up to {self._timeout_seconds:g} s for worker "
                f"{worker} to say how its part of a backup went: {error.message}. See the log of worker {worker}."
            ) from error

    def _forget(self, topic: str, name: str) -> None:
        """Removes what was said in the round before, which all have heard, since all have spoken again."""
        for key in self._heard.get(topic, ()):
            try:
                _tf.context.context().delete_config_key_value(key)
            except tf.errors.OpError as error:
                logging.debug("A word of a former agreement stays: %s", error.message)
        self._heard[topic] = [f"{name}/decided", *(f"{name}/{worker}" for worker in range(1, self.workers))]
