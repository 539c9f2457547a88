"""What an assignment on one replica means, for each kind of variable that Keras makes.

Keras marks almost all its variables alike. What tells them apart is who makes them: its name scopes carry the maker.
Where Keras first traces shapes, as in a `fit` of a model without an `Input`, they are made later, and known by name.

| kind | made by | assigned on a replica |
|---|---|---|
| weight | a layer, float, trainable | by an optimizer, or from values alike: locally; else as a statistic |
| optimizer state | an optimizer | locally: all replicas compute the same from reduced gradients |
| statistic | a layer, float, not trainable | locally, then averaged over all replicas when the step ends |
| state of rows | a stateful recurrent layer | locally: the rows of a replica are its own |
| random state | a seed generator | locally; each replica reads it shifted by its number |
| metric | a metric | locally, summed when read; a replica without rows leaves it as it is |
"""

import zlib
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.dependence import may_differ
from tfdist.strategies.step import current_step

# Keras' seeds are used modulo 2**31 - 2; multiples of this (2**32 over the golden ratio) stay far apart there.
SEED_SHIFT = 0x9E3779B1
_RANDOM_STATE = "seed_generator_state"  # What Keras calls it.


class _Scalar:
    """What Python makes a number of, as it does of a variable of one device: `float(optimizer.learning_rate)`."""

    def __float__(self):
        return float(self.numpy())

    def __int__(self):
        return int(self.numpy())


class OptimizerVariable(_Scalar, _tf.MirroredVariable):
    """Optimizer state. Also counters, which TensorFlow would copy from the first replica by leaving the step."""

    def _update_replica(self, update_fn, value, **kwargs):
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class _KeptWithoutRows(_Scalar):
    """A variable that a replica without rows leaves as it is, since its means are 0 / 0."""

    def assign(self, value, *args, **kwargs):
        return super().assign(self._if_rows(value, self), *args, **kwargs)

    def assign_add(self, value, *args, **kwargs):
        return super().assign_add(self._if_rows(value), *args, **kwargs)

    def assign_sub(self, value, *args, **kwargs):
        return super().assign_sub(self._if_rows(value), *args, **kwargs)

    def _is_of_rows(self, value):
        """Whether a replica makes `value` of its own rows."""
        del value
        return True

    def _if_rows(self, value, otherwise=None):
        step = current_step()
        if step is None or step.has_rows is True or not self._is_of_rows(value):
            return value
        value = tf.convert_to_tensor(value)
        otherwise = tf.zeros_like(value) if otherwise is None else tf.cast(otherwise, value.dtype)
        return tf.where(step.has_rows, value, otherwise)


class StatisticVariable(_KeptWithoutRows, _tf.MirroredVariable):
    """Statistics of a layer, such as BatchNormalization's moving mean."""

    def _update_replica(self, update_fn, value, **kwargs):
        step = current_step()
        if step is not None and self._is_of_rows(value) and not any(known is self for known in step.statistics):
            step.statistics.append(self)
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class WeightVariable(StatisticVariable):
    """A weight. What a step itself assigns to it, as a look ahead does, is averaged unless it is alike everywhere."""

    def _is_of_rows(self, value):
        by_optimizer = any(isinstance(caller, keras.optimizers.Optimizer) for caller in _tf.keras_callers())
        unlike = [known._get_on_device_or_primary() for known in current_step().statistics]
        return not by_optimizer and may_differ(value, unlike)


class RandomStateVariable(_Scalar, _tf.MirroredVariable):
    """The state of a seed generator: [seed, draws], int64.

    Stored alike on all replicas, so that any of them may save it and a restored run continues as if unbroken. Read on
    replica r it is shifted by r, and shifted back when assigned: replicas draw different numbers, and replica 0 those
    of a single device.
    """

    def _shift(self):
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.stack([tf.cast(replica_id, self.dtype) * SEED_SHIFT, 0])

    def _on_replica(self):
        context = tf.distribute.get_replica_context()
        return context is not None and context.num_replicas_in_sync > 1 and current_step() is not None

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


class MetricVariable(_KeptWithoutRows, _tf.SyncOnReadVariable):
    """State of a metric."""


def checksums(variables: Iterable[keras.Variable]) -> list[tuple[str, str]]:
    """Of the variables that all replicas hold alike between two steps: their paths, and checksums of their values."""
    with tf.init_scope():
        return [(each.path, _checksum(each.value.values[0])) for each in held_alike(variables)]


def held_alike(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Those of `variables` that all replicas hold alike between two steps."""
    return [each for each in variables if _is_held_alike(each)]


def _checksum(variable: tf.Variable) -> str:
    # Against slips, not against forgers: each `fit` begins with it, and it takes a quarter of the time of SHA-256.
    content = np.ascontiguousarray(variable.read_value())  # without a copy on CPUs
    return f"{zlib.crc32(content.reshape(-1).view(np.uint8).data):08x}"


def _is_held_alike(variable: keras.Variable) -> bool:
    alike = isinstance(variable.value, OptimizerVariable | StatisticVariable | RandomStateVariable)
    return alike and "gradient_accumulator" not in variable.path  # which holds what is not exchanged yet


def refine(variable, *, trainable: bool, colocated: bool):
    """Turns a distributed variable into the kind that its maker calls for; shares the variables inside."""
    kind = _kind(variable, trainable, colocated)
    if kind is None:
        return variable
    return kind(variable.distribute_strategy, variable.values, variable.aggregation)


def _kind(variable, trainable, colocated):
    if isinstance(variable, _tf.SyncOnReadVariable):
        return MetricVariable
    late = _tf.keras_variable_made_late()  # By a layer, whose scope is not open any more.
    maker = None if late is not None else next(iter(_tf.keras_callers()), None)
    if isinstance(maker, keras.optimizers.Optimizer) or colocated:
        return OptimizerVariable
    if isinstance(maker, keras.random.SeedGenerator) or (late is not None and late.name == _RANDOM_STATE):
        return RandomStateVariable
    if isinstance(maker, keras.layers.RNN):
        return None  # The states of a stateful layer belong to the rows of a replica.
    of_layer = late is not None or isinstance(maker, keras.layers.Layer)
    plain = of_layer and variable.aggregation == tf.VariableAggregation.NONE
    if plain and variable.dtype.is_floating:
        return WeightVariable if trainable else StatisticVariable
    return None
