"""The variables of a training run: lists them, captures the values of each replica for a commit, and restores them."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist._compat import keras_internals
from tfdist.backup.state_provider import CapturedState, SavedState, StateProvider, TrainedFit
from tfdist.errors import BackupError
from tfdist.strategies.collectives.shard_groups import ShardGroups
from tfdist.strategies.distributed_optimizer import optimizers_of
from tfdist.strategies.distributed_variables import OptimizerVariable, RandomStateVariable, StatisticVariable
from tfdist.strategies.local_steps.local_training import kind_of_local_steps
from tfdist.strategies.sharding.part_tensors import whole_of_arrays
from tfdist.strategies.sharding.sharded_state import ShardedState, is_accumulator

_COUNTED = re.compile(r"_[0-9]+(?=$|[/_])")  # Keras numbers layers per process. A rebuilt model has new numbers.


_IN_TURN = "%"  # Follows the key of values whose rows were dealt out in turn; see `Partition`.


@dataclasses.dataclass(frozen=True)
class Slot:
    """One variable that a commit saves, with its key and name there.

    Attributes:
      key: Kind and position, such as "weight/3". Variables of the kinds "metric" and "random" may appear and disappear.
      name: Path of the variable, without Keras' counters.
      variable: The Keras variable.
      own: Whether each replica has its own value, as for metrics in progress, accumulated gradients and sharded state.
    """

    key: str
    name: str
    variable: keras.Variable
    own: bool

    @property
    def own_key(self) -> str:
        """Key of the values that replicas have of their own; it shows how rows of tables are divided."""
        # Not `getattr`: a metric would sum its values over all workers to look for the attribute in the sum.
        partition = vars(self.variable.value).get("partition")
        return self.key + _IN_TURN if getattr(partition, "in_turn", False) else self.key

    @property
    def described(self) -> list[Any]:
        """Name, shape and dtype of the variable, which must equal those of the saved variable."""
        return [self.name, list(self.variable.shape), self.variable.dtype]

    def locals(self) -> tuple[tf.Variable, ...]:
        """Returns the TensorFlow variables that hold this Keras variable on this worker's replicas."""
        value = self.variable.value
        strategy = getattr(value, "distribute_strategy", None)
        return (value,) if strategy is None else strategy.experimental_local_results(value)


def slots_of(model: keras.Model) -> list[Slot]:
    """Returns all present variables of a model that a commit saves. The first step may make more."""
    metrics = {id(variable) for variable in model.metrics_variables}
    is_local = kind_of_local_steps(model.distribute_strategy) is not None
    kinds = {
        "weight": [variable for variable in model.variables if id(variable) not in metrics],
        "optimizer": [variable for optimizer in optimizers_of(model) for variable in optimizer.variables],
        "metric": model.metrics_variables,
        "random": [keras_internals.global_seed_generator().state]
        if keras_internals.has_global_seed_generator()
        else [],
    }
    return [
        # The path of the global generator contains the layer that first drew from it, so the name is used instead.
        Slot(
            f"{kind}/{i}",
            _COUNTED.sub("", variable.path) if kind != "random" else variable.name,
            variable,
            _is_own(variable, kind) or (is_local and _differs_by_local_steps(variable, kind)),
        )
        for kind, variables in kinds.items()
        for i, variable in enumerate(variables)
        if variable.dtype != "string"
    ]


class Identities:
    """The `id`s of a model's variables, so that callbacks do not save them again; computed at the first lookup."""

    def __init__(self, model: keras.Model):
        self._model = model

    def __contains__(self, identity: object) -> bool:
        return identity in self._all

    @functools.cached_property
    def _all(self) -> frozenset[int]:
        slots = slots_of(self._model)
        return frozenset(id(each) for slot in slots for each in (slot.variable, slot.variable.value, *slot.locals()))


class VariableStates(StateProvider):
    """Saves and restores the variables of a model, its optimizers and metrics, and Keras' global seed generator.

    Makes the variables of the model's optimizer, which the first step would make otherwise.

    Raises:
      ValueError: If the model or an optimizer that it holds has no variables yet.
    """

    name = "variables"

    def __init__(self, fit: TrainedFit):
        super().__init__(fit)
        if not fit.model.built:
            raise ValueError(
                f"BackupAndRestore needs a model with variables to restore, but {fit.model.name!r} is not built yet. "
                "Call it on a batch, or give it an Input, before `fit`."
            )
        _build_optimizers(fit.model)

    def capture(self) -> CapturedState:
        """Returns values common to all workers by key, and values of this worker's replicas by "key@replica".

        Costs about 20 µs per variable of any size: the tensors share the variables' memory, and TensorFlow copies a
        variable that is overwritten while its tensor exists.
        """
        slots = slots_of(self._fit.model)
        return CapturedState(
            shared={slot.key: _read(slot.locals()[0]) for slot in slots if not slot.own},
            own={
                f"{slot.own_key}@{replica}": _read(local)
                for slot in slots
                if slot.own
                for replica, local in enumerate(slot.locals())
            },
            plain={slot.key: slot.described for slot in slots},
        )

    def check(self, saved: SavedState) -> None:
        """Compares weights and optimizer with a commit. A later `fit` may have another optimizer."""
        kinds = ("weight/",) if saved.is_of_later_fit else ("weight/", "optimizer/")
        here = {slot.key: slot.described for slot in slots_of(self._fit.model) if slot.key.startswith(kinds)}
        there = {key: value for key, value in saved.plain.items() if key.startswith(kinds)}
        for key in [*here, *there]:
            if here.get(key) != there.get(key):
                raise BackupError(
                    f"The backup {saved.path} is of another model or optimizer: it has {_say(there.get(key))}, but "
                    f"this one has {_say(here.get(key))} ({key}). Train the model that was saved, or give another "
                    "backup_dir. Nothing was overwritten."
                )

    def lacks(self, saved: SavedState) -> bool:
        """Whether this run lacks a variable of the backup, so that a step must make it, such as one of a metric."""
        here = {slot.key: slot.described for slot in slots_of(self._fit.model)}
        return any(here.get(key) != value for key, value in saved.plain.items())

    def restore(self, saved: SavedState) -> None:
        """Assigns a commit's values to the variables that equal a saved variable. Changes no other variable.

        Worker 0 gets the sums over the former replicas if the number of workers or replicas has changed. From a later
        `fit`, only weights and the seed generator are restored.
        """
        if any(key.startswith("random/") for key in saved.plain):  # as the first step or unseeded operation would
            extended = self._fit.model.distribute_strategy.extended
            getattr(extended, "seed_generator", keras_internals.global_seed_generator)()
        for slot in slots_of(self._fit.model):
            is_left = saved.is_of_later_fit and not slot.key.startswith(("weight/", "random/"))
            if is_left or saved.plain.get(slot.key) != slot.described:
                continue
            locals_, was_shared = slot.locals(), slot.key in saved.shared
            arrays = [part.arrays for part in saved.parts]
            if saved.synchronization and not saved.is_alike and slot.key.startswith(("weight/", "optimizer/")):
                value = saved.shared[slot.key] if was_shared else _of_all(slot, arrays)
                for local in locals_:
                    local.assign(value)
                continue
            if not (saved.is_alike or was_shared) and _was_sharded(slot, arrays[0]):
                self._assign_whole(slot, _joined(slot, arrays, saved.shard_group_size))
                continue
            if not (saved.is_alike or was_shared) and is_accumulator(slot.variable):
                total = _accumulated(slot, arrays, saved.shard_group_size)
                if isinstance(slot.variable.value, ShardedState):
                    self._assign_whole(slot, total)
                else:
                    is_first = saved.worker == 0
                    for replica, local in enumerate(locals_):
                        local.assign(total if is_first and replica == 0 else np.zeros_like(total))
                continue
            if was_shared and isinstance(slot.variable.value, ShardedState):
                self._assign_whole(slot, saved.shared[slot.key])
                continue
            values = [saved.shared[slot.key]] if was_shared else []
            if not was_shared:
                values = [each for part in arrays for each in _replicas(slot.own_key, part)]
            if not saved.is_alike and (slot.own or not was_shared):
                values = _spread(slot, values, len(locals_), is_first=saved.worker == 0)
            elif was_shared:
                values *= len(locals_)
            for local, value in zip(locals_, values, strict=True):
                local.assign(value)

    def _assign_whole(self, slot: Slot, value: np.ndarray) -> None:
        """Gives a variable its whole value, of which each replica may take a part."""
        with self._fit.model.distribute_strategy.scope():
            slot.variable.value.assign(value)


def _build_optimizers(model: keras.Model) -> None:
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    lacking = [optimizer.name for optimizer in optimizers_of(model) if not optimizer.built]
    if lacking:
        raise ValueError(
            f"BackupAndRestore needs optimizers with variables to restore, but {', '.join(lacking)} of model "
            f"{model.name!r} is not built yet. Call its `build` with the weights that it trains, in the scope of the "
            "strategy, before `fit`."
        )


def _read(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)  # Costs 1/4 of `read_value`.


def _replicas(key: str, part: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    replica = 0
    while f"{key}@{replica}" in part:
        yield part[f"{key}@{replica}"]
        replica += 1


def _was_sharded(slot: Slot, part: Mapping[str, np.ndarray]) -> bool:
    """Whether a variable of which each replica has saved a value of its own was sharded."""
    if f"{slot.key}{_IN_TURN}@0" in part:
        return True
    if slot.key.startswith("weight/"):  # Other weights with values of their own still have them.
        return not slot.own or isinstance(slot.variable.value, ShardedState)
    return slot.key.startswith("optimizer/") and not is_accumulator(slot.variable)


def _joined(slot: Slot, parts: Sequence[Mapping[str, np.ndarray]], group_size: int | None) -> np.ndarray:
    """Returns the whole value of a sharded variable from the arrays that all former workers have saved.

    Each group of `group_size` replicas had the whole value. Tables were divided among all replicas.
    """
    in_turn = f"{slot.key}{_IN_TURN}@0" in parts[0]
    key = slot.key + _IN_TURN if in_turn else slot.key
    values = list(zip(*(_replicas(key, part) for part in parts), strict=True))  # [replica][worker]
    groups = None if in_turn else ShardGroups.of(group_size, len(parts), len(values))
    if groups is not None:
        values = [workers[: groups.workers_of_group] for workers in values[: groups.devices_of_group]]
    return whole_of_arrays(tuple(slot.variable.shape), [value for workers in values for value in workers], in_turn)


def _of_all(slot: Slot, parts: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Returns one value of a variable that replicas have trained by local steps: the average of a weight.

    The state of optimizers is that of the first replica; an average would not belong to any weights either.
    """
    values = [value for part in parts for value in _replicas(slot.key, part)]
    if slot.key.startswith("optimizer/") or not np.issubdtype(values[0].dtype, np.floating):
        return values[0]
    return np.mean(values, axis=0, dtype=values[0].dtype)


def _accumulated(slot: Slot, parts: Sequence[Mapping[str, np.ndarray]], group_size: int | None) -> np.ndarray:
    """Returns the sum of the gradients that former replicas have accumulated: of parts, or of whole gradients each."""
    values = [value for part in parts for value in _replicas(slot.key, part)]
    if any(value.shape != tuple(slot.variable.shape) for value in values):
        return _joined(slot, parts, group_size)
    return np.sum(values, axis=0, dtype=values[0].dtype)


def _spread(slot: Slot, saved: list[np.ndarray], replicas: int, is_first: bool) -> list[np.ndarray]:
    """Returns a variable's values for the replicas of a worker, from those of a run with other replicas."""
    if slot.variable.aggregation == "sum" or is_accumulator(slot.variable):
        total = np.sum(saved, axis=0, dtype=saved[0].dtype)
        return [total if is_first and replica == 0 else np.zeros_like(total) for replica in range(replicas)]
    if any(not np.array_equal(value, saved[0]) for value in saved):
        logging.warning(
            "%s differs between %d saved replicas: all replicas get the first value.", slot.name, len(saved)
        )
    return saved[:1] * replicas


def _is_own(variable: keras.Variable, kind: str) -> bool:
    value = variable.value
    if not isinstance(value, tf.distribute.DistributedValues):
        return False
    if isinstance(value, ShardedState):
        return True
    if kind == "random":  # Random draws have no common order, so states differ between replicas.
        return True
    if isinstance(value, OptimizerVariable | StatisticVariable | RandomStateVariable):
        return kind == "optimizer" and is_accumulator(variable)
    return not value.trainable  # as it was made: a variable frozen later is equal everywhere


def _differs_by_local_steps(variable: keras.Variable, kind: str) -> bool:
    return kind in ("weight", "optimizer") and isinstance(variable.value, OptimizerVariable | StatisticVariable)


def _say(described: Sequence[Any] | None) -> str:
    if described is None:
        return "none"
    name, shape, dtype = described
    return f"{name} of shape {tuple(shape)}, {dtype}"
