"""The content of a commit: capturing it, reading it, and restoring a model, its callbacks and its data from it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist.backup import random_states, residual_states, variable_states
from tfdist.backup.callback_states import CallbackStates, Plain
from tfdist.backup.commit_agreement import CommitAgreement
from tfdist.backup.commit_store import Commit
from tfdist.backup.commit_writer import Snapshot, read_part, versions
from tfdist.backup.serialization import apart
from tfdist.backup.sharding_positions import ShardingPositions
from tfdist.errors import BackupError
from tfdist.strategies.distributed_optimizer import exchanging_optimizers

Part = tuple[Mapping[str, np.ndarray], Any]  # of one worker: arrays and JSON


@dataclasses.dataclass
class CheckpointState:
    """The content of a commit that was read.

    Attributes:
      commit: The commit.
      plain: JSON that is common to all workers.
      shared: Arrays that are common to all workers.
      parts: The part of this worker if `is_alike`, otherwise the parts of all former workers.
      is_alike: Whether the commit was made by the present number of workers and replicas.
      finished: Number of fits that this process has finished.
    """

    commit: Commit
    plain: dict[str, Any]
    shared: Mapping[str, np.ndarray]
    parts: list[Part]
    is_alike: bool
    finished: int

    def give_back(
        self,
        model: keras.Model,
        agreement: CommitAgreement,
        states: CallbackStates,
        positions: ShardingPositions | None,
    ) -> None:
        """Restores all but the global random states; from a later `fit`, only weights, seed generator and history.

        Args:
          model: The trained model.
          agreement: The agreement of the present workers.
          states: The states of the callbacks.
          positions: The positions in the data; `None` if they are restored already.
        """
        strategy = model.distribute_strategy
        everyone = [arrays for arrays, _ in self.parts]
        variable_states.make_random(self.plain["variables"], strategy)
        slots = variable_states.slots_of(model)
        is_of_later_fit = self.plain["fit"] > self.finished
        if is_of_later_fit:  # The later `fit` restores its optimizer and metrics itself.
            slots = [slot for slot in slots if slot.key.startswith(("weight/", "random/"))]
        variable_states.restore(
            slots, self.plain["variables"], self.shared, everyone, is_alike=self.is_alike, is_first=agreement.is_chief
        )
        arrays, own = self.parts[agreement.own if not self.is_alike and agreement.own < len(self.parts) else 0]
        if is_of_later_fit:
            history = self.plain["histories"][self.finished]
            states.restore({name: {key: apart(own) for key, own in kept.items()} for name, kept in history.items()})
        else:
            if positions is not None:  # A later `fit` may have other shardings.
                positions.restore(self.plain["shardings"])
            states.restore(_callback_states(own["callbacks"], arrays))
            self._restore_residuals(model, everyone)

    def give_back_random(self, names: frozenset[str] = random_states.NAMES) -> None:
        """Restores the named global random states. Does nothing if the number of workers or replicas has changed."""
        if self.is_alike:
            random_states.restore(self.parts[0][1]["random"], names)

    @property
    def random_of_input(self) -> Any:
        """The random states at the start of the input; `None` if the number of workers or replicas has changed."""
        return self.parts[0][1]["random_of_input"] if self.is_alike else None

    def _restore_residuals(self, model: keras.Model, parts: list[Mapping[str, np.ndarray]]) -> None:
        communication = getattr(model.distribute_strategy, "communication", None)
        if communication is None:
            return
        optimizers = exchanging_optimizers(model)
        if self.is_alike:
            residual_states.restore(communication, optimizers, _prefixed(parts[0], "residuals/"))
        else:
            residual_states.redistribute(communication, optimizers, [_prefixed(part, "pending/") for part in parts])


def load(commit: Commit, model: keras.Model, agreement: CommitAgreement, finished: int) -> CheckpointState:
    """Reads a commit and compares it with the model.

    A commit of a later `fit` than the present one may have another optimizer: a model may be compiled between fits.

    Raises:
      BackupError: If model, optimizer or `steps_per_execution` do not fit the commit, or a file is damaged.
    """
    if agreement.is_chief:
        _tell_of_versions(commit)
    shared, plain = read_part(commit, "state")
    is_of_later_fit = plain["fit"] > finished
    kinds = ("weight/",) if is_of_later_fit else ("weight/", "optimizer/")
    variable_states.check_same(variable_states.slots_of(model), plain["variables"], commit.path, kinds)
    steps = model.steps_per_execution
    if plain["batch"] % steps and not is_of_later_fit:
        raise BackupError(
            f"The backup {commit.path} was made after batch {plain['batch']} of an epoch, where "
            f"steps_per_execution={steps} cannot begin. Compile with {plain['steps_per_execution']}, as before."
        )
    before = commit.manifest["workers"]
    is_alike = (agreement.workers, model.distribute_strategy.num_replicas_in_sync) == (before, plain["replicas"])
    parts: list[Part] = [
        read_part(commit, f"part-{worker}") for worker in ([agreement.own] if is_alike else range(before))
    ]
    if not is_alike:
        parts = [
            ({**arrays, **read_part(commit, f"late-{worker}")[0]}, own) for worker, (arrays, own) in enumerate(parts)
        ]
    return CheckpointState(commit, plain, shared, parts, is_alike, finished)


def take(
    number: int,
    described: Mapping[str, Any],
    position: Mapping[str, Any],
    model: keras.Model,
    states: CallbackStates,
    random_of_input: Any,
) -> Snapshot:
    """Captures the present state for a commit, in the form that `load` reads and `CheckpointState` restores.

    Args:
      number: Number of the commit.
      described: Description of the commit for its manifest.
      position: JSON that is common to all workers, without variables.
      model: The trained model.
      states: The states of the callbacks.
      random_of_input: The random states at the start of the present input.
    """
    communication = getattr(model.distribute_strategy, "communication", None)
    slots, optimizers = variable_states.slots_of(model), exchanging_optimizers(model)
    shared, own = variable_states.capture(slots)
    kept = residual_states.capture(communication, optimizers)
    callbacks, arrays = _apart(states.capture())
    return Snapshot(
        number,
        described,
        shared,
        {**own, **_with_prefix(kept, "residuals/"), **arrays},
        {"variables": {slot.key: slot.described for slot in slots}, **position},
        {"callbacks": callbacks, "random": random_states.capture(), "random_of_input": random_of_input},
        lambda: _with_prefix(residual_states.pending(communication, optimizers, kept), "pending/"),
    )


def _tell_of_versions(commit: Commit) -> None:
    before, now = commit.manifest.get("versions", {}), versions()
    others = [f"{name} {before[name]} (here: {now[name]})" for name in now if before.get(name, now[name]) != now[name]]
    if others:
        logging.warning(
            "%s was made by %s: what is trained from it may differ in its bits.", commit.path, ", ".join(others)
        )


def _prefixed(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _with_prefix(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def _apart(states: Mapping[str, Mapping[str, Plain]]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Splits states of callbacks into JSON and arrays by name."""
    saved = {
        name: {key: [node, len(arrays)] for key, (node, arrays) in attributes.items()}
        for name, attributes in states.items()
    }
    return saved, {
        f"callbacks/{name}/{key}/{i}": array
        for name, attributes in states.items()
        for key, (_, arrays) in attributes.items()
        for i, array in enumerate(arrays)
    }


def _callback_states(saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Plain]]:
    """Returns the states that were given to `_apart`."""
    return {
        name: {
            key: (node, [arrays[f"callbacks/{name}/{key}/{i}"] for i in range(count)])
            for key, (node, count) in attributes.items()
        }
        for name, attributes in saved.items()
    }
