"""The meaning of an assignment on one replica, for each kind of variable that Keras makes.

Keras marks almost all variables alike, so the kind follows from the maker, which Keras' name scopes show. If Keras
traces shapes first, as in `fit` for a model without `Input`, it makes variables later, and the name shows the kind.

| kind | made by | assigned on a replica |
|---|---|---|
| weight | a layer, float, trainable | by an optimizer, or with equal values: locally; else like a statistic |
| optimizer state | an optimizer | locally, since all replicas compute the same from the summed gradients |
| statistic | a layer, float, not trainable | locally, then averaged over all replicas when the step ends |
| state of rows | a stateful recurrent layer | locally, since each replica has rows of its own |
| random state | a seed generator | locally; each replica reads it shifted by its replica number |
| metric | a metric | locally, summed when read; not changed by a replica without rows |
"""

import functools
import zlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._compat import keras_internals, keras_stack, tf_internals
from tfdist.strategies.graph_analysis import may_differ
from tfdist.strategies.step import current_step, replicas

# Keras uses seeds modulo 2**31 - 2; multiples of this number (2**32 over the golden ratio) stay far apart there.
SEED_SHIFT = 0x9E3779B1
_RANDOM_STATE = "seed_generator_state"  # Keras' name for it


class _Scalar:
    """Mixin for variables that convert to a Python number as on one device, as in `float(optimizer.learning_rate)`."""

    def __float__(self):
        return float(self.numpy())

    def __int__(self):
        return int(self.numpy())


class OptimizerVariable(_Scalar, tf_internals.MirroredVariable):
    """Optimizer state, including counters, assigned on each replica by itself, since all compute the same value."""

    def _update_replica(self, update_fn, value, **kwargs):
        step = current_step()
        if step is not None and step.sharded_update is not None:
            step.sharded_update.assigned.append(self)
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class _KeptWithoutRows(_Scalar):
    """A variable that a replica without rows of the batch does not change, since means over no rows are 0 / 0."""

    def assign(self, value, *args, **kwargs):
        return super().assign(self._if_rows(value, self), *args, **kwargs)

    def assign_add(self, value, *args, **kwargs):
        return super().assign_add(self._if_rows(value), *args, **kwargs)

    def assign_sub(self, value, *args, **kwargs):
        return super().assign_sub(self._if_rows(value), *args, **kwargs)

    def _is_of_rows(self, value):
        """Whether a replica computes the assigned `value` from its own rows of the batch."""
        del value
        return True

    def _if_rows(self, value, otherwise=None):
        step = current_step()
        if step is None or step.has_rows is True or not self._is_of_rows(value):
            return value
        value = tf.convert_to_tensor(value)
        otherwise = tf.zeros_like(value) if otherwise is None else tf.cast(otherwise, value.dtype)
        return tf.where(step.has_rows, value, otherwise)


class StatisticVariable(_KeptWithoutRows, tf_internals.MirroredVariable):
    """A statistic of a layer, such as BatchNormalization's moving mean, averaged over replicas when a step ends."""

    def _update_replica(self, update_fn, value, **kwargs):
        step = current_step()
        if (
            step is not None
            and self._is_of_rows(value)
            and not any(known is self for known in step.observed.statistics)
        ):
            step.observed.statistics.append(self)
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class WeightVariable(StatisticVariable):
    """A weight. Values that a step assigns without an optimizer are averaged if replicas may differ."""

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns rows of the weight. Does not read the other rows."""
        return self._get_on_device_or_primary().sparse_read(indices, name=name)

    def _is_of_rows(self, value):
        by_optimizer = any(isinstance(caller, keras.optimizers.Optimizer) for caller in keras_internals.open_scopes())
        unlike = [known._get_on_device_or_primary() for known in current_step().observed.statistics]
        return not by_optimizer and may_differ(value, unlike)


class RandomStateVariable(_Scalar, tf_internals.MirroredVariable):
    """The state of a seed generator: [seed, draws], int64.

    The stored value is equal on all replicas, so that any replica can save it and a restored run continues exactly. A
    read on replica r shifts the value by r, and an assignment shifts it back. So replicas draw different numbers, and
    replica 0 draws the numbers of a single device.
    """

    def _shift(self):
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.stack([tf.cast(replica_id, self.dtype) * SEED_SHIFT, 0])

    def _on_replica(self):
        context = tf.distribute.get_replica_context()
        return context is not None and current_step() is not None and replicas() > 1

    def _get_as_operand(self):
        value = super()._get_as_operand()
        return value + self._shift() if self._on_replica() else value

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        value = super()._dense_var_to_tensor(dtype=dtype, name=name, as_ref=as_ref)
        return value + self._shift() if self._on_replica() else value

    def _update_replica(self, update_fn, value, **kwargs):
        if self._on_replica():
            value = value - self._shift()
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class MetricVariable(_KeptWithoutRows, tf_internals.SyncOnReadVariable):
    """State of a metric, updated on each replica by itself and summed over replicas when read."""


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model and of its optimizer."""
    return [*model.variables, *optimizer_variables(model)]


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model's optimizer, if it has one."""
    optimizer = getattr(model, "optimizer", None)
    return optimizer.variables if optimizer else []


def checksums(variables: Iterable[keras.Variable]) -> list[tuple[str, str]]:
    """Paths and checksums of the variables that are equal on all replicas between steps, to compare workers."""
    with tf.init_scope():
        return [(each.path, _checksum(each.value.values[0])) for each in held_alike(variables)]


def held_alike(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Selects the variables that are equal on all replicas between steps, such as weights; not metrics."""
    return [each for each in variables if _is_held_alike(each)]


def level_counters(variables: Iterable[keras.Variable]) -> None:
    """Sets integers, such as `iterations`, that must be equal on all replicas to the largest value in this process.

    In a step that finds no batch, TensorFlow still runs operations that need no batch: it increments `iterations` of an
    optimizer and the draws of a seed generator. One device does so reliably. With several devices, TensorFlow may
    cancel some of them earlier, and their replicas would differ from then on. Costs a read of each integer.
    """
    for variable in held_alike(variables):
        copies = variable.value.values
        if not variable.value.dtype.is_integer or len(copies) < 2:
            continue
        values = [copy.numpy() for copy in copies]
        largest = functools.reduce(np.maximum, values)
        for copy, value in zip(copies, values, strict=True):
            if np.any(value != largest):
                copy.assign(largest)


def _checksum(variable: tf.Variable) -> str:
    # CRC-32 takes a quarter of the time of SHA-256, and suffices against mistakes. Each `fit` begins with one.
    content = np.ascontiguousarray(variable.read_value())  # without a copy on CPUs
    return f"{zlib.crc32(content.reshape(-1).view(np.uint8).data):08x}"


def _is_held_alike(variable: keras.Variable) -> bool:
    alike = isinstance(variable.value, OptimizerVariable | StatisticVariable | RandomStateVariable)
    return alike and "gradient_accumulator" not in variable.path  # Accumulated gradients are not exchanged yet.


def refine(variable, *, trainable: bool, colocated: bool):
    """Returns a variable of the class that defines what an assignment means for its kind; unchanged if no class fits.

    Kinds are weights, optimizer states, statistics, metrics and random states; see the table at the top of this file.
    """
    kind = _kind(variable, trainable, colocated)
    if kind is None:
        return variable
    refined = kind(variable.distribute_strategy, variable.values, variable.aggregation)
    made = keras_stack.variable_being_made()
    if made is not None and isinstance(refined, WeightVariable):
        keras_internals.look_up_rows(made)
    return refined


def _kind(variable, trainable, colocated):
    if isinstance(variable, tf_internals.SyncOnReadVariable):
        return MetricVariable
    late = keras_stack.variable_made_late()  # Made by a layer after its name scope was closed.
    maker = None if late is not None else next(iter(keras_internals.open_scopes()), None)
    if isinstance(maker, keras.optimizers.Optimizer) or colocated:
        return OptimizerVariable
    if isinstance(maker, keras.random.SeedGenerator) or (late is not None and late.name == _RANDOM_STATE):
        return RandomStateVariable
    if isinstance(maker, keras.layers.RNN):
        return None  # States of a stateful layer belong to the rows of a replica.
    of_layer = late is not None or isinstance(maker, keras.layers.Layer)
    plain = of_layer and variable.aggregation == tf.VariableAggregation.NONE
    if plain and variable.dtype.is_floating:
        return WeightVariable if trainable else StatisticVariable
    return None
