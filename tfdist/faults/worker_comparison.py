"""Compares the workers' settings, models and data before use, since different collectives would wait forever."""

import collections
import contextlib
import itertools
import math
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import WAIT_FOR_CHIEF, ClusterError, WorkerLostError
from tfdist.events.phase_names import WAITING
from tfdist.faults import beside_steps
from tfdist.faults.coordination_store import CoordinationStore

__all__ = ["WorkerComparison"]

_PEEK_SECONDS = 0.05  # To read a value that may exist.
_LOOK_SECONDS = 1.0  # Between two checks whether a comparison is still needed.
_OPTIONAL_SECONDS = 10.0  # For an optional comparison.
_ASK_SECONDS = 5.0  # Between two checks that a silent peer still runs.
_LATE_SECONDS = 20.0  # For the value of a worker that has said that it is late.

_compared = itertools.count()  # Numbers the comparisons, in the same order on all workers.
_done_alone: collections.Counter[str] = collections.Counter()  # Likewise, for each action of the chief alone.


class WorkerComparison:
    """Checks that the workers of a strategy have equal settings, models and data, and raises an error otherwise.

    Args:
      board: The coordination store of this worker.
      timeout_seconds: How long all workers may take to reach the same comparison.
    """

    def __init__(self, board: CoordinationStore, timeout_seconds: float):
        self._board = board
        self._timeout_seconds = timeout_seconds
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._verdict: str | None = None

    def on_setup(self, devices: int, options: Mapping[str, str]) -> None:
        """Compares the number of devices of all workers, and options of their strategies: values by name.

        Raises:
          ClusterError: If the workers differ, or a worker does not come.
        """
        said = self._exchange("setup", [str(devices), *options.values()])
        hint = "Hide devices by CUDA_VISIBLE_DEVICES, or make equally many logical CPUs on all workers."
        self._compare({worker: own[:1] for worker, own in said.items()}, "the same number of devices", hint)
        for place, what in enumerate(options, start=1):
            said_of_it = {worker: own[place : place + 1] for worker, own in said.items()}
            self._compare(said_of_it, f"the same {what}", "Give the same in all scripts.")

    def on_model(
        self, model: Any, checksums: Callable[[], Iterable[tuple[str, str]]], codecs: Callable[[], list[str]]
    ) -> None:
        """Compares a model at its first run: shapes, types and codecs of variables, then values of replicated ones.

        Costs two messages to worker 0, and two for each worker.

        Args:
          model: The model.
          checksums: Returns the names of the replicated variables with checksums of their values.
          codecs: Returns the codecs that the user's function chooses for the variables.

        Raises:
          ClusterError: If the variables differ, or a worker does not come.
        """
        if model in self._models:
            return
        self._models.add(model)
        optimizer = type(getattr(model, "optimizer", None)).__name__
        # Names are not compared: Keras numbers them across all models of a process.
        variables = [
            f"variable {number} as {variable.dtype}{list(variable.shape)}"
            for number, variable in enumerate(model.variables)
        ]
        said = self._exchange("model", [f"the optimizer {optimizer}", *variables, *codecs()])
        self._compare(said, "the same model", "Build it from the same code and settings on all workers.")
        self.on_values(checksums())

    def has_compared(self, model: Any) -> bool:
        """Returns whether `on_model` has already compared the model with those of the peers."""
        return model in self._models

    def on_values(self, checksums: Iterable[tuple[str, str]]) -> None:
        """Compares the values of a model's replicated variables on all workers, by checksums.

        Raises:
          ClusterError: If the values differ, or a worker does not come.
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
            "Load, set or adapt them on all workers, not on the chief alone; or save them on one and load them on all."
        )
        self._compare(named, "the same values in a model", hint)

    def on_fit(self, described: list[str]) -> None:
        """Compares the arguments of `fit` on all workers.

        Raises:
          ClusterError: If the arguments differ, or a worker does not come.
        """
        hint = "Give the same arguments on all workers; use tfdist.callbacks.ChiefOnly for work of the chief alone."
        self._compare(self._exchange("fit", described), "the same arguments of `fit`", hint)

    def on_description(self, described: list[str]) -> None:
        """Compares the workers' layers, optimizer, losses and options of a model before its first use.

        Raises:
          ClusterError: If these descriptions differ, or a worker does not come.
        """
        hint = "Build and compile it by the same code and settings on all workers."
        self._compare(self._exchange("description", described), "the same model", hint)

    def on_data(self, described: list[str]) -> None:
        """Compares the types and the sizes of the data that the workers give to `fit` or another call.

        Raises:
          ClusterError: If the data differ, or a worker does not come.
        """
        hint = (
            "Each worker reads the whole data and keeps its part of every batch: give all workers the same data and "
            "batch_size, and remove `.shard(n, i)`, `x[i::n]` and similar code. If each worker shall read its own "
            "data, use AutoShardPolicy.OFF or `distribute_datasets_from_function`."
        )
        self._compare(self._exchange("data", described), "the same data", hint)

    def on_sharding(self, described: list[str], shown: list[str]) -> None:
        """Compares the data and arguments of a `BalancedSharding` on all workers.

        Args:
          described: The properties that must be equal.
          shown: The same properties as an error shows them.

        Raises:
          ClusterError: If the properties differ, or a worker does not come.
        """
        said, count = self._exchange("sharding", [*described, *shown]), len(described)
        compared = {worker: own[:count] for worker, own in said.items()}
        named = {worker: own[count:] for worker, own in said.items()}
        hint = "Give all workers the same data, order, seed and arguments; paths may differ."
        self._compare(compared, "the same BalancedSharding", hint, named)

    def on_position(self, described: list[str]) -> None:
        """Compares how far each worker has read in a `BalancedSharding`.

        Raises:
          ClusterError: If the positions differ, or a worker does not come.
        """
        hint = (
            "Restore it from the same checkpoint on all workers, and read from it on all or on none. A loop in a graph "
            "also counts batches read ahead: if it ends within repeated epochs, call next() outside of the graph."
        )
        self._compare(self._exchange("position", described), "a BalancedSharding at the same position", hint)

    @property
    def here(self) -> str:
        """A text that names this worker and its host, for error messages."""
        return f"worker {self._board.worker} on {socket.gethostname()}"

    @property
    def speaks(self) -> bool:
        """Whether this worker logs messages that are the same on all workers, so that only one does."""
        return self._board.worker == 0

    def next_name(self, subject: str) -> str:
        """Returns a name for a later comparison. All workers must call this method in the same order."""
        return f"{subject}-{next(_compared)}"

    def is_alike(self, name: str, own: Any, waits: bool, is_closed: Callable[[], bool]) -> bool:
        """Returns whether all workers have the same value, as worker 0 decides. Costs three messages of each worker.

        Args:
          name: The name that `next_name` returned.
          own: The value of this worker.
          waits: Whether all workers must come here. The watchdog then ends the wait if a peer does not come. Otherwise
            a worker that has waited for ten seconds continues as if all values were equal.
          is_closed: Returns whether the answer is no longer needed.

        Raises:
          ClusterError: If a worker's program has ended before it wrote its value, or a worker does not come.
          tf.errors.OpError: If the coordination store is out of reach.
        """
        if not waits:
            deadline = time.monotonic() + _OPTIONAL_SECONDS
            return self._decide(name, own, lambda: is_closed() or time.monotonic() > deadline)
        with beside_steps.waiting_for_all("the comparison of the first batch of a dataset") as wait:
            decided = self._decide(name, own, lambda: is_closed() or wait.fault is not None)
        if wait.fault is not None:
            raise ClusterError(wait.fault)
        return decided

    def say_late(self, name: str) -> None:
        """Tells peers in `is_alike` that the value of this worker may never come, because its data may have failed.

        Peers wait some seconds more, and then continue as if all values were equal. They would wait too long otherwise:
        an error in the data only appears in the first step, before which this worker needs its peers.
        """
        self._board.say_once(f"{name}-late", True)

    def _decide(self, name: str, own: Any, is_over: Callable[[], bool]) -> bool:
        """Returns whether all workers' values that arrive before `is_over` are equal."""
        late_since: dict[int, float] = {}

        def is_given_up(worker: int) -> bool:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                if worker not in late_since and self._board.hear(f"{name}-late", worker, _PEEK_SECONDS):
                    late_since[worker] = time.monotonic()
            return time.monotonic() - late_since.get(worker, math.inf) > _LATE_SECONDS

        def hear(subject: str, worker: int) -> Any:
            return self._hear_unless(subject, worker, lambda: is_over() or is_given_up(worker))

        verdict = f"{name}-verdict"
        if self._board.worker:
            self._board.say_once(name, own)
            decided = hear(verdict, 0)
            # A late chief finds no value to compare with. The report of the first step carries the checksums again.
            self._board.say(name, None) if decided is None else self._board.forget(name)
            return decided is not False
        said = [hear(name, worker) for worker in self._board.others]
        decided = all(each is None or each == own for each in said)
        self._board.say_once(verdict, decided)
        if self._verdict is not None:  # A peer that wrote a new value has read the last verdict.
            self._board.forget(self._verdict)
        self._verdict = verdict
        return decided

    def exchange_described(self, name: str, own: Any) -> dict[int, Any]:
        """Returns every worker's description of a value that differs between workers, for an error.

        Raises:
          ClusterError: If a worker does not come.
        """
        said = self._gather(name, own)
        # All wait until each has read: worker 0 hosts the store, and may end as soon as it raises.
        self._board.exchange(f"{name}-heard", True, _ASK_SECONDS)
        return said

    def _hear_unless(self, subject: str, worker: int, is_over: Callable[[], bool]) -> Any:
        """Waits for the value that a worker stores under a subject, and returns it; `None` once `is_over`."""
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
        """On the chief: tells peers in `wait_for_chief` that the chief's action is done, or how it failed."""
        with contextlib.suppress(tf.errors.OpError):  # Peers notice themselves that the store is out of reach.
            self._board.say(_alone(what), {"failure": failure})

    def wait_for_chief(self, what: str, check: Callable[[int], None]) -> None:
        """On the chief's peers: waits until the chief has done `what` alone. Costs a message to worker 0.

        There is no deadline here: the watchdog limits the chief's time, and knows that this worker waits.

        Args:
          what: Name of the chief's action. Call this method once for each `tell_done` of the chief.
          check: Raises unless the given worker answers; see `PeerProbe.check`.

        Raises:
          ClusterError: If the action failed on the chief, or the chief is gone or its program has ended.
        """
        subject, said = _alone(what), None
        with beside_steps.section(WAITING):
            while said is None:
                try:
                    said = self._hear_chief(subject, what, check)
                except tf.errors.OpError as error:
                    raise self._without_chief(what, f"the chief is lost: {error.message}") from error
        if said["failure"] is not None:
            raise self._without_chief(what, f"it failed there: {said['failure']}")

    def _hear_chief(self, subject: str, what: str, check: Callable[[int], None]) -> Any:
        """Returns the chief's message on how its action ended, `None` if none came for some seconds."""
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            return self._board.hear(subject, 0, _ASK_SECONDS)
        check(0)
        return self._board.last_word(subject, 0, what, 0) if self._board.is_over(0) else None

    def _without_chief(self, what: str, why: str) -> WorkerLostError:
        return WorkerLostError(
            f"{WAIT_FOR_CHIEF}, here in {what}, but {why}. This is worker "
            f"{self._board.worker} on {socket.gethostname()}. See the log of worker 0."
        )

    def _exchange(self, subject: str, own: list[str]) -> dict[int, list[str]]:
        return self._gather(self.next_name(subject), own)

    def _gather(self, subject: str, own: Any) -> dict[int, Any]:
        said = dict(self._board.exchange(subject, own, self._timeout_seconds))
        missing = [str(worker) for worker in range(self._board.workers) if worker not in said]
        if missing:
            raise WorkerLostError(
                f"All workers must join a comparison within {self._timeout_seconds:g} s, but worker "
                f"{', '.join(missing)} did not ({subject}). This is worker {self._board.worker} on "
                f"{socket.gethostname()}. See their logs, or raise start_timeout_seconds of tfdist.FaultTolerance."
            )
        return said

    def _compare(
        self, said: Mapping[int, list[str]], what: str, way_out: str, shown: Mapping[int, list[str]] | None = None
    ) -> None:
        """Raises at the first difference of the workers' lists. Names one worker for each value, by `shown` if any."""
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
