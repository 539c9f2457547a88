"""A fault at a named step of a training, as a Keras callback."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist.cluster import ClusterSpec
from tfdist.failure_report import ATTEMPT
from tfdist.testing import faults

__all__ = ["Fault"]


class Fault(keras.callbacks.Callback):
    """Lets something happen to a worker at the end of a training step, once in an attempt.

        model.fit(..., callbacks=[tfdist.testing.Fault("kill", worker=1, step=7)])

    Args:
      kind: What happens to the worker:

        - "kill": it is gone at once; "freeze": it stops, but does not end (SIGSTOP); "preempt": it is asked to go
          (SIGTERM);
        - "raise": this callback raises `RuntimeError`; "hang": it never returns;
        - "slow": it computes `factor` times slower from now on;
        - "fill_disk", "cut_network" (of `link`): see the functions of `tfdist.testing.faults`.
      worker: Which worker.
      step: After which training step, as the optimizer counts them: also those before a restore.
      attempt: In which attempt of `tfdist run`, 0 before any restart; `None` for each.
      factor: Of "slow".
      link: Of "cut_network", the name of a network interface.

    Raises:
      ValueError: If `kind` is none of these.
    """

    def __init__(
        self,
        kind: str,
        *,
        worker: int,
        step: int,
        attempt: int | None = 0,
        factor: float = 2.0,
        link: str = "eth0",
    ):
        super().__init__()
        if kind not in _KINDS:
            raise ValueError(f"Fault needs a kind out of {', '.join(_KINDS)}, got {kind!r}.")
        spec = ClusterSpec.from_env()
        here = (spec.worker_id if spec else 0) == worker
        self._kind = kind
        self._step = step
        self._factor = factor
        self._link = link
        self._is_due = here and attempt in (None, int(os.environ.get(ATTEMPT, "0")))

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Lets it happen, if this is the step."""
        if self._is_due and int(self.model.optimizer.iterations.numpy()) >= self._step:
            self._is_due = False
            sys.stderr.write(f"tfdist.testing.Fault: {self._kind} after step {self._step}\n")
            sys.stderr.flush()
            _KINDS[self._kind](self)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"raised by tfdist.testing.Fault after step {fault._step}")


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(0.01)


def _slow(fault: Fault) -> None:
    fault._slowdown = faults.Slowdown(os.getpid(), fault._factor)


_KINDS: dict[str, Callable[[Fault], Any]] = {
    "kill": lambda fault: faults.kill(os.getpid()),
    "freeze": lambda fault: faults.freeze(os.getpid()),
    "preempt": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _raise,
    "hang": _hang,
    "slow": _slow,
    "fill_disk": lambda fault: faults.fill_disk(),
    "cut_network": lambda fault: faults.cut_network(fault._link),
}
