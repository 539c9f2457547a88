"""Workers compare what they are about to do, since unlike collectives wait for each other without end."""

import collections
import contextlib
import itertools
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import WAIT_FOR_CHIEF, ClusterError, WorkerLostError
from tfdist.faults import watchdog
from tfdist.faults.coordination_store import CoordinationStore

__all__ = ["WorkerAgreement"]

_LOOK_SECONDS = 1.0  # Between two looks at whether what waits is still needed.
_OPTIONAL_SECONDS = 10.0  # For workers that need not come.
_ASK_SECONDS = 5.0  # Whether the chief is still there, of which nothing was heard.

_compared = itertools.count()  # In this process; as many, and in the same order, on all workers.
_done_alone: collections.Counter[str] = collections.Counter()  # Likewise, of each thing that only the chief does.


class WorkerAgreement:
    """What the workers of a strategy must have alike.

    Args:
      board: Where workers meet.
      timeout_seconds: For all to come to the same point.
    """

    def __init__(self, board: CoordinationStore, timeout_seconds: float):
        self._board = board
        self._timeout_seconds = timeout_seconds
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._verdict: str | None = None

    def on_setup(self, devices: int, compression: str, transport: str) -> None:
        """Compares numbers of devices, codecs and transports.

        Raises:
          ClusterError: If they are unlike, or a worker does not come.
        """
        said = self._exchange("setup", [str(devices), compression, transport])
        hint = "Hide devices by CUDA_VISIBLE_DEVICES, or make as many logical CPUs on each."
        self._compare({worker: own[:1] for worker, own in said.items()}, "the same number of devices", hint)
        for place, what in ((1, "compression"), (2, "transport")):
            said_of_it = {worker: own[place : place + 1] for worker, own in said.items()}
            self._compare(said_of_it, f"the same {what}", "Change the scripts.")

    def on_model(self, model: Any, checksums: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Compares a model's variables when it is first run: shapes and types, then the values of those held alike.

        Costs two messages to worker 0, and two for each worker.

        Args:
          model: The model.
          checksums: Gives the names of those held alike, and checksums of their values.

        Raises:
          ClusterError: If they are unlike, or a worker does not come.
        """
        if model in self._models:
            return
        self._models.add(model)
        optimizer = type(getattr(model, "optimizer", None)).__name__
        # Without names, which Keras counts up over all models of a process.
        variables = [
            f"variable {number} as {variable.dtype}{list(variable.shape)}"
            for number, variable in enumerate(model.variables)
        ]
        said = self._exchange("model", [f"the optimizer {optimizer}", *variables])
        self._compare(said, "the same model", "Build it from the same code and settings on each.")
        self.on_values(checksums())

    def has_compared(self, model: Any) -> bool:
        """Whether `on_model` has compared it."""
        return model in self._models

    def on_values(self, checksums: Iterable[tuple[str, str]]) -> None:
        """Compares the values of variables that are held alike; see `on_model`.

        Raises:
          ClusterError: If they are unlike, or a worker does not come.
        """
        paths, own = [], []
        for path, checksum in checksums:
            paths.append(path)
            own.append(checksum)
        said = self._exchange("values", own)
        named = {
            worker: [f"{value} in {path!r}" for value, path in zip(values, paths, strict=False)]
            for worker, values in said.items()
        }
        hint = (
            "Load, set or adapt them on all workers alike, not on the chief alone; or load on all what one has adapted."
        )
        self._compare(named, "the same values in a model", hint)

    def on_fit(self, described: list[str]) -> None:
        """Compares what a `fit` was given.

        Raises:
          ClusterError: If it is unlike, or a worker does not come.
        """
        hint = "Call it alike on all workers; what only the chief does is for tfdist.callbacks.ChiefOnly."
        self._compare(self._exchange("fit", described), "the same arguments of `fit`", hint)

    def on_description(self, described: list[str]) -> None:
        """Compares layers, optimizer, losses and options of a model before it is first used.

        Raises:
          ClusterError: If they are unlike, or a worker does not come.
        """
        hint = "Build and compile it by the same code and settings on each."
        self._compare(self._exchange("description", described), "the same model", hint)

    def on_data(self, described: list[str]) -> None:
        """Compares the kinds and the numbers of what all workers read.

        Raises:
          ClusterError: If they are unlike, or a worker does not come.
        """
        hint = (
            "Each reads the whole data and keeps its part of every batch: give all the same data and batch_size. To "
            "let each read data of its own, see `distribute_datasets_from_function`."
        )
        self._compare(self._exchange("data", described), "the same data", hint)

    def on_sharding(self, described: list[str], shown: list[str]) -> None:
        """Compares what a `BalancedSharding` hands out.

        Args:
          described: What must be alike.
          shown: The same, as an error shows it.

        Raises:
          ClusterError: If it is unlike, or a worker does not come.
        """
        said, count = self._exchange("sharding", [*described, *shown]), len(described)
        compared = {worker: own[:count] for worker, own in said.items()}
        named = {worker: own[count:] for worker, own in said.items()}
        hint = "Give all the same data in the same order, and the same seed and arguments; paths may differ."
        self._compare(compared, "the same BalancedSharding", hint, named)

    def on_position(self, described: list[str]) -> None:
        """Compares where workers stand in a `BalancedSharding`.

        Raises:
          ClusterError: If it is not the same place, or a worker does not come.
        """
        hint = (
            "Restore it from the same checkpoint on all workers, and read from it on all or on none. A loop in a graph "
            "counts what was read ahead: where it ends amid repeated epochs, take its batches by next() outside."
        )
        self._compare(self._exchange("position", described), "a BalancedSharding in the same place", hint)

    @property
    def here(self) -> str:
        """This worker and its host, in words."""
        return f"worker {self._board.worker} on {socket.gethostname()}"

    @property
    def speaks(self) -> bool:
        """Whether this worker logs what all would log alike."""
        return self._board.worker == 0

    def next_name(self, subject: str) -> str:
        """A name for a comparison that is made later; all workers must ask for it in the same order."""
        return f"{subject}-{next(_compared)}"

    def is_alike(self, name: str, own: Any, waits: bool, is_closed: Callable[[], bool]) -> bool:
        """Whether all workers say the same; worker 0 decides. Costs three messages of each worker.

        Args:
          name: What `next_name` gave.
          own: What this worker says.
          waits: Whether all workers must come here. The watchdog knows of the wait, and ends it if others do not come.
            Otherwise a worker that waits for ten seconds goes on as if all were alike.
          is_closed: Whether nobody needs the answer any more.

        Raises:
          ClusterError: If the program of a worker is over that has said nothing, or a worker does not come.
          tf.errors.OpError: If the service is out of reach.
        """
        if not waits:
            deadline = time.monotonic() + _OPTIONAL_SECONDS
            return self._decide(name, own, lambda: is_closed() or time.monotonic() > deadline)
        with watchdog.waiting_for_all("the comparison of the first batch of a dataset") as meeting:
            decided = self._decide(name, own, lambda: is_closed() or meeting.fault is not None)
        if meeting.fault is not None:
            raise ClusterError(meeting.fault)
        return decided

    def _decide(self, name: str, own: Any, is_over: Callable[[], bool]) -> bool:
        """Whether all workers say the same, as far as is heard until `is_over`."""

        def hear(subject: str, worker: int) -> Any:
            return self._hear_unless(subject, worker, is_over)

        verdict = f"{name}-verdict"
        if self._board.worker:
            self._board.say_once(name, own)
            decided = hear(verdict, 0)
            self._board.forget(name)
            return decided is not False
        said = [hear(name, worker) for worker in self._board.others]
        decided = all(each is None or each == own for each in said)
        self._board.say_once(verdict, decided)
        if self._verdict is not None:  # All have heard it that have said something since.
            self._board.forget(self._verdict)
        self._verdict = verdict
        return decided

    def exchange_described(self, name: str, own: Any) -> dict[int, Any]:
        """What all workers say of something that is unlike.

        Raises:
          ClusterError: If a worker does not come.
        """
        said = self._gather(name, own)
        # Who raises first may end at once, and worker 0 keeps what the others have not heard yet.
        self._board.exchange(f"{name}-heard", True, _ASK_SECONDS)
        return said

    def _hear_unless(self, subject: str, worker: int, is_over: Callable[[], bool]) -> Any:
        """What a worker says, as soon as it does; `None` once `is_over`."""
        asked = time.monotonic()
        while True:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                return self._board.hear(subject, worker, _LOOK_SECONDS)
            if is_over():
                return None
            if time.monotonic() - asked > _ASK_SECONDS:
                asked, absent = time.monotonic(), self._board.absent()
                if absent is not None:
                    return self._board.last_word(subject, worker, "the first batch of a dataset", absent)

    def tell_done(self, what: str, failure: str | None) -> None:
        """On the chief: tells who `wait_for_chief` that what it does alone is done, or how it failed."""
        with contextlib.suppress(tf.errors.OpError):  # If the service is out of reach, they learn it by that.
            self._board.say(_alone(what), {"failure": failure})

    def wait_for_chief(self, what: str, check: Callable[[int], None]) -> None:
        """On the others: waits until the chief has done `what` alone. Costs a message to worker 0.

        It has no deadline of its own: the watchdog knows how long the chief may take, and that this worker waits.

        Args:
          what: What it does; as often as the chief `tell_done`.
          check: Returns if a worker answers, see `Health.check`.

        Raises:
          ClusterError: If it failed there, or the chief is gone or its program over.
        """
        subject, said = _alone(what), None
        with watchdog.section(watchdog.WAITING):
            while said is None:
                try:
                    said = self._hear_chief(subject, what, check)
                except tf.errors.OpError as error:
                    raise self._without_chief(what, f"the chief is gone: {error.message}") from error
        if said["failure"] is not None:
            raise self._without_chief(what, f"it failed there: {said['failure']}")

    def _hear_chief(self, subject: str, what: str, check: Callable[[int], None]) -> Any:
        """What the chief says, `None` if nothing for some seconds."""
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            return self._board.hear(subject, 0, _ASK_SECONDS)
        check(0)
        return self._board.last_word(subject, 0, what, 0) if self._board.is_over(0) else None

    def _without_chief(self, what: str, why: str) -> WorkerLostError:
        return WorkerLostError(
            f"{WAIT_FOR_CHIEF}, here {what}, but {why}. This is worker "
            f"{self._board.worker} on {socket.gethostname()}. See the log of worker 0."
        )

    def _exchange(self, subject: str, own: list[str]) -> dict[int, list[str]]:
        return self._gather(self.next_name(subject), own)

    def _gather(self, subject: str, own: Any) -> dict[int, Any]:
        said = dict(self._board.exchange(subject, own, self._timeout_seconds))
        missing = [str(worker) for worker in range(self._board.workers) if worker not in said]
        if missing:
            raise WorkerLostError(
                f"All workers must come to the same point within {self._timeout_seconds:g} s, but worker "
                f"{', '.join(missing)} did not ({subject}). This is worker {self._board.worker} on "
                f"{socket.gethostname()}. See their logs, or raise start_timeout_seconds of tfdist.FaultTolerance."
            )
        return said

    def _compare(
        self, said: Mapping[int, list[str]], what: str, way_out: str, shown: Mapping[int, list[str]] | None = None
    ) -> None:
        """Raises where workers say unlike things, naming one worker for each, with what is `shown` in their place."""
        for place, entries in enumerate(itertools.zip_longest(*said.values(), fillvalue="nothing")):
            firsts: dict[str, int] = {}
            for worker, entry in zip(said, entries, strict=True):
                firsts.setdefault(entry, worker)
            if len(firsts) > 1:
                texts = {worker: shown[worker][place] if shown else entry for entry, worker in firsts.items()}
                described = ", ".join(f"worker {worker} has {text}" for worker, text in texts.items())
                raise ClusterError(
                    f"All workers must have {what}, but {described}. This is worker {self._board.worker} on "
                    f"{socket.gethostname()}. {way_out}"
                )


def _alone(what: str) -> str:
    _done_alone[what] += 1
    return f"alone-{what}-{_done_alone[what]}"
