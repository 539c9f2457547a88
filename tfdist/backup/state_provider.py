"""The interface `StateProvider` for each kind of state in a backup, such as variables, and the data it works on."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np

from tfdist.backup.fit_progress import FitProgress


@dataclasses.dataclass(frozen=True)
class FitInput:
    """The facts about the input of a `fit` that its backup needs.

    Attributes:
      epochs: Keras' `EpochIterator` if all epochs share one iterator, as under `steps_per_epoch`; otherwise `None`.
      batches: Number of batches of an epoch, if known.
      batches_of_pass: Number of batches of one pass over the data, if known. An epoch may be longer or shorter.
      sharding: The `BalancedSharding` that produces the input, if there is one.
      first_epoch: The argument `initial_epoch` of `fit`.
      validates: Whether epochs end with a validation.
      is_known: Whether a `fit` was found. The input of a custom loop is unknown.
    """

    epochs: Any = None
    batches: int | None = None
    batches_of_pass: int | None = None
    sharding: Any = None
    first_epoch: int = 0
    validates: bool = False
    is_known: bool = False


@dataclasses.dataclass(frozen=True)
class TrainedFit:
    """The running `fit` that is backed up. Its lists are kept from one `fit` of a process to the next.

    Attributes:
      model: The trained model.
      callbacks: All callbacks of the `fit` but the `FitBackup`, after they have begun.
      input: The input.
      starts: The attributes of callbacks at the start; see `CallbackStates`.
      histories: The histories of the `fit`s that the program has finished.
    """

    model: keras.Model
    callbacks: Sequence[keras.callbacks.Callback] = ()
    input: FitInput = FitInput()
    starts: list[Any] = dataclasses.field(default_factory=list)
    histories: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class CapturedState:
    """The present state of one kind, such as variables or callbacks, for a commit."""

    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # tensors that are equal on all workers
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # tensors and arrays of this worker
    plain: Any = None  # JSON that is equal on all workers
    own_plain: Any = None  # JSON of this worker
    # Returns more arrays of this worker, for another number of workers or replicas; called in a background thread.
    late: Callable[[], Mapping[str, Any]] = dict


class WorkerPart(NamedTuple):
    """The state of one worker in a commit: arrays, JSON, and `late` arrays, read only if replicas have changed."""

    arrays: Mapping[str, np.ndarray]
    plain: Any
    late: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The state of one kind, such as variables or callbacks, as a commit has it.

    Attributes:
      path: Folder of the commit, for messages.
      progress: Progress of the program at the commit.
      shared: Arrays that are equal on all workers. `plain` is JSON that is.
      parts: The state that this worker saved if `is_alike`; otherwise the states of all former workers.
      worker: Number of this worker.
      is_alike: Whether the commit was made by as many workers and replicas as now, with the same `model_sharding`,
        groups of the same size, and a `synchronization` that keeps the same state.
      finished: Number of `fit`s that this process has finished.
      shard_group_size: Number of replicas of a group in the commit; `None` for one group of all.
      synchronization: Describes the state of `LocalSGD` or `DiLoCo`, see `described_state`; `None` without local steps.
      is_reread: Whether this process has read the input again, up to the position of the commit.
    """

    path: str
    progress: FitProgress
    shared: Mapping[str, np.ndarray]
    plain: Any
    parts: Sequence[WorkerPart]
    worker: int
    is_alike: bool
    finished: int
    shard_group_size: int | None = None
    synchronization: str | None = None
    is_reread: bool = False

    @property
    def is_of_later_fit(self) -> bool:
        """Whether the commit is of a later `fit` than the present one, which is skipped.

        The later `fit` restores its optimizer, metrics, data and callbacks itself.
        """
        return self.progress.fit > self.finished

    @property
    def own(self) -> WorkerPart:
        """The state that this worker saved in the commit; that of worker 0 for a worker that did not exist then."""
        return self.parts[self.worker if not self.is_alike and self.worker < len(self.parts) else 0]


class StateProvider(abc.ABC):
    """Captures one kind of state of a `fit`, such as variables, for a commit, and restores it.

    `snapshot.PROVIDERS` registers all kinds. A `fit` makes one provider of each kind when all its callbacks have begun.
    """

    name: ClassVar[str]
    """The name of the state in a commit."""

    def __init__(self, fit: TrainedFit):
        self._fit = fit

    @abc.abstractmethod
    def capture(self) -> CapturedState:
        """Returns the present state for a commit. Later training does not change it."""

    def check(self, saved: SavedState) -> None:  # noqa: B027 (most states fit any program)
        """Checks before training that `restore` can restore the saved state, and changes nothing.

        Raises:
          BackupError: If the state belongs to another model or to other data.
        """

    @abc.abstractmethod
    def restore(self, saved: SavedState) -> None:
        """Restores the saved state. May be called several times, since other callbacks change it in between."""
