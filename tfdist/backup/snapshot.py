"""All states of a `fit` (variables, callbacks, positions, codec and random states): for a commit, and from one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from tfdist.backup.callback_states import CallbackStates
from tfdist.backup.chief_decision import ChiefDecision
from tfdist.backup.commit_store import Commit
from tfdist.backup.fit_progress import FitProgress
from tfdist.backup.input_position import InputPosition
from tfdist.backup.local_step_states import LocalStepStates
from tfdist.backup.part_files import read_part
from tfdist.backup.random_states import RandomStates
from tfdist.backup.residual_states import ResidualStates
from tfdist.backup.state_provider import SavedState, StateProvider, TrainedFit, WorkerPart
from tfdist.backup.variable_states import VariableStates
from tfdist.strategies.local_steps.local_training import state_of_local_steps

PROVIDERS: tuple[type[StateProvider], ...] = (
    VariableStates,
    LocalStepStates,
    InputPosition,
    CallbackStates,
    ResidualStates,
    RandomStates,
)
"""All kinds of saved state, in the order in which they are restored."""

Provider = TypeVar("Provider", bound=StateProvider)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All states of a `fit` for a commit, joined; see `CapturedState`. The writer empties it after copying.

    Attributes:
      step: Number of the commit.
      described: Description of the commit for its manifest.
    """

    step: int
    described: Mapping[str, Any]
    shared: dict[str, Any]
    own: dict[str, Any]
    plain: Any
    own_plain: Any
    late: Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a commit that was read: progress of the `fit`, and each `StateProvider`'s state by its name."""

    commit: Commit
    progress: FitProgress
    states: Mapping[str, SavedState]


class FitStates:
    """All states of one `fit` that a commit holds: one `StateProvider` of each kind, such as `VariableStates`."""

    def __init__(self, fit: TrainedFit):
        self._model = fit.model
        self._providers = [kind(fit) for kind in PROVIDERS]
        self._replicas = fit.model.distribute_strategy.num_replicas_in_sync
        self._sharding = getattr(fit.model.distribute_strategy, "model_sharding", None)
        self._local = state_of_local_steps(fit.model.distribute_strategy)
        parts = getattr(fit.model.distribute_strategy.extended, "parts", None)
        self._group_size = None if parts is None or parts.groups is None else parts.shards

    def of_kind(self, kind: type[Provider]) -> Provider:
        """Returns the `StateProvider` of a class, such as `InputPosition`."""
        return next(provider for provider in self._providers if isinstance(provider, kind))

    def capture(self, step: int, described: Mapping[str, Any], progress: FitProgress) -> Snapshot:
        """Captures the present states of the `fit` for commit number `step`, whose manifest gets `described`."""
        self._await_exchanges()
        states = {provider.name: provider.capture() for provider in self._providers}
        late = {name: state.late for name, state in states.items()}
        return Snapshot(
            step,
            described,
            _joined({name: state.shared for name, state in states.items()}),
            _joined({name: state.own for name, state in states.items()}),
            {
                "progress": progress.to_json(),
                "model_sharding": self._sharding,
                "shard_group_size": self._group_size,
                "synchronization": self._local,
                "states": {name: state.plain for name, state in states.items()},
            },
            {name: state.own_plain for name, state in states.items()},
            lambda: _joined({name: arrays() for name, arrays in late.items()}),
        )

    def _await_exchanges(self) -> None:
        """Awaits exchanges in the background, which would change states while these are captured."""
        training = getattr(self._model.distribute_strategy.extended, "local_training", None)
        if training is not None:
            with self._model.distribute_strategy.extended.waiting_for_synchronization():
                training.await_averages(self._model)

    def read(self, commit: Commit, agreement: ChiefDecision, finished: int) -> Checkpoint:
        """Reads a commit, and checks before training that it fits the model and the data.

        `finished` is the number of `fit`s that this process has finished.

        Raises:
          BackupError: If the commit is of another model or of other data, or if a file is damaged.
        """
        shared, plain = read_part(commit, "state")
        progress, before = FitProgress.from_json(plain["progress"]), commit.manifest["workers"]
        here = (agreement.workers, self._replicas, self._sharding, self._group_size, self._local)
        group_size = plain.get("shard_group_size")
        local = plain.get("synchronization")
        is_alike = here == (before, progress.replicas, plain.get("model_sharding"), group_size, local)
        parts = [_read_worker(commit, worker, is_alike) for worker in ([agreement.own] if is_alike else range(before))]
        states = {
            name: SavedState(
                path=commit.path,
                progress=progress,
                shared=_of(name, shared),
                plain=plain["states"][name],
                parts=[WorkerPart(_of(name, part.arrays), part.plain[name], _of(name, part.late)) for part in parts],
                worker=agreement.own,
                is_alike=is_alike,
                finished=finished,
                shard_group_size=group_size,
                synchronization=local,
            )
            for name in (provider.name for provider in self._providers)
        }
        for provider in self._providers:
            provider.check(states[provider.name])
        return Checkpoint(commit, progress, states)

    def restore(self, checkpoint: Checkpoint, *, is_reread: bool = False) -> None:
        """Restores all states of the `fit` from a commit. `is_reread`: whether the input was read again up to it."""
        for provider in self._providers:
            provider.restore(dataclasses.replace(checkpoint.states[provider.name], is_reread=is_reread))


def _read_worker(commit: Commit, worker: int, is_alike: bool) -> WorkerPart:
    late = {} if is_alike else read_part(commit, f"late-{worker}")[0]
    return WorkerPart(*read_part(commit, f"part-{worker}"), late)


def _joined(arrays_of: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}/{key}": array for name, arrays in arrays_of.items() for key, array in arrays.items()}


def _of(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of one `StateProvider` from the joined arrays of all."""
    return {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
