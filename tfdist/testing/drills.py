"""A fault at a named step of a training, as a Keras callback."""

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

from tfdist import _tf
from tfdist.cluster import ClusterSpec
from tfdist.failure_report import ATTEMPT
from tfdist.testing import faults

__all__ = ["Fault"]


class Fault(keras.callbacks.Callback):
    """Lets something happen to a worker at the end of a training step, once in an attempt.

        model.fit(..., callbacks=[tfdist.testing.Fault("kill", worker=1, step=7)])

    Without `tfdist run` nobody counts attempts: a start that restores a backup is then none of the first, any other is
    attempt 0. What kills a job before its first backup so happens in each start.

    Args:
      kind: What happens to the worker:

        - "kill": it is gone at once; "freeze": it stops, but does not end (SIGSTOP); "preempt": it is asked to go
          (SIGTERM);
        - "raise": this callback raises `RuntimeError`; "hang": it never returns, and the watchdog ends the job after
          what a callback may take, 30 minutes or `stall_timeout_seconds`;
        - "slow": it computes `factor` times slower from now on;
        - "corrupt" (`path`): a file is damaged; "fill_disk" (from `largest_bytes` on), "cut_network" (of `link`): see
          the functions of `tfdist.testing.faults`.
      worker: Which worker.
      step: After which training step, as the optimizer counts them: also those before a restore. Where the model has
        no optimizer that counts, those that this callback has seen, also before a restore by `BackupAndRestore`.
      attempt: In which attempt of `tfdist run`, 0 before any restart; `None` for each.
      factor: Of "slow".
      link: Of "cut_network", the name of a network interface.
      path: Of "corrupt", a file; or a `backup_dir`, for one of the files of its newest backup.
      largest_bytes: Of "fill_disk", the size up to which files can be written.

    Raises:
      ValueError: If `kind` is none of these, "corrupt" has no `path`, or there is no such worker.
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
            raise ValueError('Fault("corrupt") needs a path: of a file, or of a backup_dir.')
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
        """What a backup keeps: how many steps were seen, and not whether it has happened."""
        return {"seen": self._seen, "in_epoch": self._in_epoch}

    def set_state(self, state: dict[str, int]) -> None:
        """Counts on from those of a backup."""
        self._seen, self._in_epoch = state["seen"], state["in_epoch"]
        if ATTEMPT not in os.environ and not self._is_for_each:
            self._is_due = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Counts the batches of this epoch."""
        self._in_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Lets it happen, if this is the step."""
        self._seen, self._in_epoch = self._seen + batch + 1 - self._in_epoch, batch + 1
        if self._is_due and self._steps() >= self._step:
            self._is_due = False
            sys.stderr.write(f"tfdist.testing.Fault: {self._kind} after step {self._step}\n")
            sys.stderr.flush()
            _KINDS[self._kind](self)

    def _steps(self) -> int:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None or not int(_tf.counter_of(optimizer).numpy()):
            return self._seen
        return int(optimizer.iterations.numpy())


def _is_here(worker: int, attempt: int | None) -> bool:
    """Whether it is to happen to this worker, in this attempt.

    Raises:
      ValueError: If there is no such worker, of a job that has not been made smaller since.
    """
    spec, present = ClusterSpec.from_env(), int(os.environ.get(ATTEMPT, "0"))
    own, workers = (spec.worker_id, spec.num_workers) if spec else (0, 1)
    if not 0 <= worker < workers and present == (attempt or 0):
        raise ValueError(f"Fault needs a worker from 0 to {workers - 1}, as there are {workers}, got {worker}.")
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
    """The file itself; of a `backup_dir` one of the newest backup, by chance.

    Raises:
      FileNotFoundError: If there is none.
    """
    if not path.is_dir():
        return path
    backups = [each for each in path.iterdir() if re.fullmatch("step-[0-9]+", each.name)]
    if not backups:
        raise FileNotFoundError(f'Fault("corrupt") needs a backup in {path}, and there is none yet.')
    newest = max(backups, key=lambda each: int(each.name.partition("-")[2]))
    return random.Random(seed).choice(sorted(each for each in newest.rglob("*") if each.is_file()))


_KINDS: dict[str, Callable[[Fault], Any]] = {
    "kill": lambda fault: faults.kill(os.getpid()),
    "freeze": lambda fault: faults.freeze(os.getpid()),
    "preempt": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _raise,
    "hang": _hang,
    "slow": _slow,
    "corrupt": _corrupt,
    "fill_disk": lambda fault: faults.fill_disk(fault._largest_bytes),
    "cut_network": lambda fault: faults.cut_network(fault._link),
}
