"""A Keras callback that injects a fault at a given step of training."""

import os
import pathlib
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist._compat import keras_internals
from tfdist.cluster import ClusterSpec
from tfdist.run_files import ATTEMPT
from tfdist.testing import faults


class Fault(keras.callbacks.Callback):
    """Injects a fault into a worker at the end of a training step, once per attempt.

        model.fit(..., callbacks=[tfdist.testing.Fault("kill", worker=1, step=7)])

    Without `tfdist run`, attempts are not counted. Then a start that restores a backup counts as a later attempt, and
    any other start as attempt 0. So a fault that kills the job before its first backup happens in each start.

    Args:
      kind: The fault:

        - "kill": the worker dies at once (SIGKILL); "freeze": the worker stops, but does not end (SIGSTOP); "preempt":
          the worker receives SIGTERM;
        - "raise": this callback raises `RuntimeError`; "hang": this callback never returns, and the watchdog ends the
          job after the time limit of a callback, 30 minutes unless `stall_timeout_seconds` is set;
        - "slow": the worker computes `factor` times slower from then on;
        - "corrupt" (uses `path`): damages a file; "fill_disk" (uses `largest_bytes`) and "cut_network" (uses `link`):
          see the functions of `tfdist.testing.faults`.
      worker: Id of the worker.
      step: Training step after which the fault happens, as the optimizer counts steps, including steps before a
        restore. If no optimizer counts steps, this callback counts, and `BackupAndRestore` restores its count.
      attempt: Attempt of `tfdist run` in which the fault happens, 0 before any restart; `None` for every attempt.
      factor: Slowdown factor of "slow".
      link: Name of the network interface for "cut_network".
      path: File for "corrupt", or a `backup_dir`, to damage one file of its newest backup.
      largest_bytes: Largest file size that "fill_disk" still allows.

    Raises:
      ValueError: If `kind` is unknown, "corrupt" has no `path`, or the job has no such worker.
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
        path: str | os.PathLike[str] | None = None,
        largest_bytes: int = 1 << 16,
    ):
        super().__init__()
        if kind not in _KINDS:
            raise ValueError(f"Fault needs a kind out of {', '.join(_KINDS)}, got {kind!r}.")
        if kind == "corrupt" and path is None:
            raise ValueError('Fault("corrupt") needs the `path` of a file or of a backup_dir.')
        self._kind = kind
        self._step = step
        self._factor = factor
        self._link = link
        self._path = path
        self._largest_bytes = largest_bytes
        self._is_due = _is_here(worker, attempt)
        self._is_for_each = attempt is None
        self._seen = self._in_epoch = 0

    def get_state(self) -> dict[str, int]:
        """Returns the number of training steps seen, for a backup. It omits whether the fault has happened."""
        return {"seen": self._seen, "in_epoch": self._in_epoch}

    def set_state(self, state: dict[str, int]) -> None:
        """Restores the step counts from a backup."""
        self._seen, self._in_epoch = state["seen"], state["in_epoch"]
        if ATTEMPT not in os.environ and not self._is_for_each:
            self._is_due = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Resets the count of this epoch's batches, which gives the training step if no optimizer counts."""
        self._in_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Injects the fault if its step has been reached."""
        self._seen, self._in_epoch = self._seen + batch + 1 - self._in_epoch, batch + 1
        if self._is_due and self._steps() >= self._step:
            self._is_due = False
            sys.stderr.write(f"tfdist.testing.Fault: {self._kind} after step {self._step}\n")
            sys.stderr.flush()
            _KINDS[self._kind](self)

    def _steps(self) -> int:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None or not int(keras_internals.counter_of(optimizer).numpy()):
            return self._seen
        return int(optimizer.iterations.numpy())


def _is_here(worker: int, attempt: int | None) -> bool:
    """Returns whether the `Fault` is to happen on this worker in this attempt of `tfdist run`.

    Raises:
      ValueError: If the job has no such worker in the attempt of the fault. Other attempts may have fewer workers.
    """
    spec, present = ClusterSpec.from_env(), int(os.environ.get(ATTEMPT, "0"))
    own, workers = (spec.worker_id, spec.num_workers) if spec else (0, 1)
    if not 0 <= worker < workers and present == (attempt or 0):
        raise ValueError(f"Fault needs a worker from 0 to {workers - 1}, since there are {workers}, got {worker}.")
    return own == worker and attempt in (None, present)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"raised by tfdist.testing.Fault after step {fault._step}")


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(0.01)


def _slow(fault: Fault) -> None:
    fault._slowdown = faults.Slowdown(os.getpid(), fault._factor)


def _corrupt(fault: Fault) -> None:
    assert fault._path is not None
    told = faults.corrupt(_file_at(pathlib.Path(fault._path), fault._step), fault._step)
    sys.stderr.write(f"tfdist.testing.Fault: {told}\n")


def _file_at(path: pathlib.Path, seed: int) -> pathlib.Path:
    """Returns the file to damage: `path` if it is a file, or a random file of the newest backup in a `backup_dir`.

    Raises:
      FileNotFoundError: If the folder contains no backup.
    """
    if not path.is_dir():
        return path
    backups = [each for each in path.iterdir() if re.fullmatch("step-[0-9]+", each.name)]
    if not backups:
        raise FileNotFoundError(f'Fault("corrupt") needs a backup in {path}, but there is none yet.')
    newest = max(backups, key=lambda each: int(each.name.partition("-")[2]))
    return random.Random(seed).choice(sorted(each for each in newest.rglob("*") if each.is_file()))


_KINDS: dict[str, Callable[[Fault], Any]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda fault: faults.freeze(os.getpid()),
    "preempt": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _raise,
    "hang": _hang,
    "slow": _slow,
    "corrupt": _corrupt,
    "fill_disk": lambda fault: faults.fill_disk(fault._largest_bytes),
    "cut_network": lambda fault: faults.cut_network(fault._link),
}
