"""Replaces Keras' losses over each replica's rows by losses over the global batch."""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals
from tfdist.strategies.step import Step, current_step, replicas

_MEAN, _SUM, _WEIGHTED_MEAN = "mean", "sum", "mean_with_sample_weight"
_REDUCTIONS = {"sum_over_batch_size": _MEAN, "mean": _MEAN, "sum": _SUM, "mean_with_sample_weight": _WEIGHTED_MEAN}


@contextmanager
def global_losses(model: keras.Model, is_plain: bool) -> Iterator[None]:
    """Makes the losses passed to `compile` equal those of one device, while a step of `model` runs.

    A replica's loss is weighted by its rows, which is right for plain means over rows. `_GlobalLoss` replaces other
    losses. For an unreduced loss Keras takes the gradient of the sum and logs the mean. In Keras' own steps such a loss
    is converted to one number; a step of the user's (`is_plain`) may reduce it differently.
    """
    losses = keras_internals.ReplacedLosses(model, _GlobalLoss, _weighted_by_rows)
    compute_loss = model.compute_loss

    def compute(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = compute_loss(x, y, y_pred, sample_weight, training)
        return _number(loss, current_step(), training) if loss.shape.rank else loss

    if not is_plain:
        object.__setattr__(model, "compute_loss", compute)
    try:
        with contextlib.nullcontext() if is_plain else _sums_of_activity(model):
            yield
    finally:
        losses.put_back()
        if not is_plain:
            object.__delattr__(model, "compute_loss")


@contextmanager
def _sums_of_activity(model: keras.Model) -> Iterator[None]:
    """Makes sums of activity regularizers over rows equal those of one device; other versions of Keras add means."""
    layers = keras_internals.layers_of(model) if keras_internals.sums_activity_over_rows() else []
    regularized = [(layer, layer.activity_regularizer) for layer in layers if layer.activity_regularizer is not None]
    try:
        for layer, regularizer in regularized:
            layer.activity_regularizer = _SumOverReplicas(regularizer)
        yield
    finally:
        for layer, regularizer in regularized:
            layer.activity_regularizer = regularizer


class _SumOverReplicas(keras.regularizers.Regularizer):
    """A regularizer of the rows of all replicas, before its multiplication by this replica's share.

    Keras divides the losses of layers by the number of replicas.
    """

    def __init__(self, regularizer: Any):
        self._regularizer = regularizer

    def __call__(self, x: Any) -> Any:
        loss, step = self._regularizer(x), current_step()
        if step is None:
            return loss
        return loss * tf.cast(_unshared(step, tf.ones([])) * replicas(), loss.dtype)


class _GlobalLoss:
    """A `keras.losses.Loss` over the rows of all replicas, before its multiplication by this replica's share.

    Corrects losses that the number of rows alone must not weight:
    - A mask, of the output or of the loss (`ignore_class`): Keras divides by the replica's number of unmasked places.
    - `reduction="sum"`: the number of rows must not weight the loss.
    - `reduction="mean_with_sample_weight"`: Keras divides by the sum of the replica's own weights.
    - A mean that the loss computes itself: Keras does not divide it by the number of replicas.

    Costs an exchange of a number for each output of the first and the third kind.
    """

    def __init__(self, loss: keras.losses.Loss):
        self._loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        step, reduction = current_step(), _REDUCTIONS.get(self._loss.reduction)
        if step is None or reduction is None:
            return self._loss(y_true, y_pred, sample_weight)
        if type(self._loss).__call__ is not keras.losses.Loss.__call__:
            loss, masked = self._loss(y_true, y_pred, sample_weight), keras_internals.get_keras_mask(y_pred)
            return loss * tf.cast(_factor(step, reduction, masked, sample_weight), loss.dtype)
        values, mask = self._values(y_true, y_pred)
        if reduction == _SUM:
            sample_weight = _unshared(step, _product(mask, sample_weight))
        elif reduction == _WEIGHTED_MEAN and (mask is not None or sample_weight is not None):
            weight = _product(mask, sample_weight)
            sample_weight = _unshared(step, tf.math.divide_no_nan(weight, _total(step, weight)))
            reduction = _SUM
        elif mask is not None:
            mask = tf.cast(mask, tf.float32)
            places = tf.size(mask, tf.int64) * tf.distribute.get_strategy().num_replicas_in_sync
            weight = mask * tf.math.divide_no_nan(tf.cast(places, tf.float32), _total(step, mask))
            sample_weight = _product(_unshared(step, weight), sample_weight)
        if values.shape.rank == 0 and reduction != _SUM:
            values = values[None]
        return _AsTheyAre(reduction, self._loss.dtype)(values, values, sample_weight)

    def _values(self, y_true: Any, y_pred: Any) -> tuple[tf.Tensor, Any]:
        """The loss before its reduction, and the mask of its elements that count; `None` if all count."""
        loss, masks = self._loss, [keras_internals.get_keras_mask(y_pred)]
        y_true, y_pred = (
            keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), each)
            for each in (y_true, y_pred)
        )
        with keras.name_scope(loss.name):
            values = loss.call(y_true, y_pred)
        masks.append(keras_internals.get_keras_mask(values))
        given = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
        values = tf.identity(keras.ops.convert_to_tensor(values, dtype=loss.dtype))  # without its mask
        return values, functools.reduce(tf.logical_and, given) if given else None


def _factor(step: Step, reduction: str, mask: Any, sample_weight: Any) -> tf.Tensor:
    """The factor for a replica's loss if the class of the loss overrides `__call__`."""
    norm = None
    if reduction == _WEIGHTED_MEAN and (mask is not None or sample_weight is not None):
        norm = _product(mask, sample_weight)
    elif reduction == _MEAN and mask is not None:
        norm = tf.cast(mask, tf.float32)
    if norm is None:
        return _unshared(step, tf.ones([])) if reduction == _SUM else tf.ones([])
    own = tf.reduce_sum(norm) * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32)
    return _unshared(step, tf.math.divide_no_nan(own, _total(step, norm)))


def _weighted_by_rows(update_state: Any) -> Any:
    """Wraps `update_state` of a loss' mean: a step counts once if Keras does not know its rows."""

    def update(values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        if step is not None and values.shape.rank:
            values = values / tf.distribute.get_strategy().num_replicas_in_sync  # Keras has multiplied by it.
        elif step is not None and sample_weight is None:
            share = _share(step)
            sample_weight = (1.0 if share is None else share) / replicas()
        return update_state(values, sample_weight=sample_weight)

    return update


class _AsTheyAre(keras.losses.Loss):
    """A Keras loss that returns given values as they are, so that Keras only weights and reduces them."""

    def __init__(self, reduction: str, dtype: str):
        super().__init__(reduction=reduction, dtype=dtype)

    def call(self, y_true, y_pred):
        del y_true
        return y_pred


def _number(loss: tf.Tensor, step: Step, training: bool) -> tf.Tensor:
    """Converts an unreduced loss to a number with the gradient of its sum and the value of its mean."""
    gradient = _unshared(step, tf.reduce_sum(loss)) if training else tf.reduce_sum(loss)
    # Keras multiplies logged losses by the number of replicas, since means are divided by it.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.stop_gradient(tf.reduce_mean(loss) / replicas) + (gradient - tf.stop_gradient(gradient))


def _product(mask: Any, weight: Any) -> tf.Tensor:
    """Multiplies a mask [B, ...] by sample weights, which may lack its last dimensions or have 1 more of size 1."""
    if mask is None or weight is None:
        return tf.cast(1 if mask is weight else weight if mask is None else mask, tf.float32)
    mask, weight = tf.cast(mask, tf.float32), tf.cast(weight, tf.float32)
    if weight.shape.rank == mask.shape.rank + 1 and weight.shape[-1] == 1:
        weight = tf.squeeze(weight, -1)
    while weight.shape.rank < mask.shape.rank:
        weight = weight[..., None]
    return mask * weight


def _total(step: Step, values: tf.Tensor) -> tf.Tensor:
    """The sum of `values`, such as a mask or sample weights, over all elements and all replicas with rows."""
    own = tf.reduce_sum(values) * tf.cast(step.has_rows, tf.float32)
    return step.all_reduce(tf.distribute.ReduceOp.SUM, own)


def _unshared(step: Step, weight: tf.Tensor) -> tf.Tensor:
    """Divides `weight` by the weight of the replica's rows, by which its loss will be multiplied later."""
    return weight if _share(step) is None else tf.math.divide_no_nan(weight, step.weight)


def _share(step: Step) -> tf.Tensor | None:
    """The weight of this replica's loss by its rows (`Step.share`); `None` if the rows are not known."""
    if step.share is None:
        step.exchange_rows()
    return step.share
