"""Losses taken over the global batch where Keras takes them over each replica's rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.step import Step, current_step

_MEAN, _SUM, _WEIGHTED_MEAN = "mean", "sum", "mean_with_sample_weight"
_NAMES = {"sum_over_batch_size": _MEAN, "mean": _MEAN, "sum": _SUM, "mean_with_sample_weight": _WEIGHTED_MEAN}


@contextmanager
def global_losses(model: keras.Model, step_name: str) -> Iterator[None]:
    """Makes `model.compute_loss` equal to one device, while its step of that name is traced or run.

    A replica's loss is weighted by its rows, which is right for plain means over rows. Four kinds need more; the first
    three get it through the sample weights that their `keras.losses.Loss` is given:

    - a mask: Keras divides by the unmasked places among the replica's rows, of which replicas have unlike parts;
    - `reduction="sum"`, which no number of rows may weight;
    - `reduction="mean_with_sample_weight"`, for which Keras divides by the sum of the replica's own weights;
    - `reduction="none"`, of which Keras takes the gradient of the sum, and logs the mean.

    Costs an exchange of two numbers for each output of the first and the third kind. A model whose class has a
    `compute_loss` of its own is left as it is.
    """
    if type(model).compute_loss is not keras.Model.compute_loss or "compute_loss" in vars(model):
        yield
        return
    compute_loss = model.compute_loss
    # A step of the user's may reduce it in a way of its own.
    is_number_wanted = getattr(type(model), step_name) is getattr(keras.Model, step_name)

    def compute(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = weighted(x, y, y_pred, sample_weight, training)
        return _number(loss, current_step(), training) if is_number_wanted and loss.shape.rank else loss

    def weighted(x, y, y_pred, sample_weight, training):
        outputs = keras.tree.flatten(y_pred)
        losses = [(loss, _reduction(loss)) for loss in _loss_of_each(model, y_pred)]
        given = _weight_of_each(sample_weight, len(outputs))
        if len(given) != len(outputs):  # Weights of some outputs; Keras finds out which.
            return compute_loss(x, y, y_pred, sample_weight, training)
        step, reductions = current_step(), [reduction for _, reduction in losses]
        weights = [_global_weight(step, *each) for each in zip(reductions, outputs, given, strict=True)]
        if all(weight is old for weight, old in zip(weights, given, strict=True)):
            return compute_loss(x, y, y_pred, sample_weight, training)
        unmasked = keras.tree.map_structure(tf.identity, y_pred)  # The mask is in the weights.
        divided = [loss for (loss, reduction), own in zip(losses, given, strict=True) if _is_divided(reduction, own)]
        with _summed(divided):
            return compute_loss(x, y, unmasked, keras.tree.pack_sequence_as(y_pred, weights), training)

    object.__setattr__(model, "compute_loss", compute)
    try:
        yield
    finally:
        object.__delattr__(model, "compute_loss")


def _number(loss: tf.Tensor, step: Step, training: bool) -> tf.Tensor:
    """A loss that was left unreduced, as a number with the gradient of its sum and the value of its mean."""
    gradient = _unshared(step, tf.reduce_sum(loss)) if training else tf.reduce_sum(loss)
    # Keras multiplies what it logs by the replicas, as means are divided by them.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.stop_gradient(tf.reduce_mean(loss) / replicas) + (gradient - tf.stop_gradient(gradient))


def _loss_of_each(model: keras.Model, y_pred: Any) -> list[Any]:
    """The loss of each output, in the order in which Keras flattens them."""
    losses, count = getattr(model, "loss", None), len(keras.tree.flatten(y_pred))
    if isinstance(losses, dict) and isinstance(y_pred, list | tuple):
        losses = [losses.get(name) for name in model.output_names]
    if isinstance(losses, dict) and isinstance(y_pred, dict):
        losses = {name: losses.get(name) for name in y_pred}  # Some may have none.
    if not isinstance(losses, dict | list | tuple):
        return [losses] * count
    each = keras.tree.flatten(losses)
    return each if len(each) == count else [None] * count


def _weight_of_each(sample_weight: Any, count: int) -> list[Any]:
    each = [None] if sample_weight is None else keras.tree.flatten(sample_weight)
    return each * count if len(each) == 1 else each


def _reduction(loss: Any) -> str | None:
    """How Keras reduces it; functions and names stand for means."""
    return _NAMES.get(loss.reduction) if isinstance(loss, keras.losses.Loss) else _MEAN


def _is_divided(reduction: str | None, weight: Any) -> bool:
    """Whether a loss is divided by the sum of its weights; `_global_weight` does it for Keras."""
    return reduction == _WEIGHTED_MEAN and weight is not None


@contextmanager
def _summed(losses: list[Any]) -> Iterator[None]:
    """Makes losses sums, for as long as nothing is exchanged: other replicas of the process share them."""
    before = [loss.reduction for loss in losses]
    try:
        for loss in losses:
            loss.reduction = _SUM
        yield
    finally:
        for loss, reduction in zip(losses, before, strict=True):
            loss.reduction = reduction


def _global_weight(step: Step, reduction: str | None, output: tf.Tensor, weight: Any) -> Any:
    """Sample weights with which a loss of this replica, weighted by `step.share`, adds up to that of all replicas."""
    mask = _tf.get_keras_mask(output)
    if reduction == _SUM:
        return _unshared(step, _product(mask, weight))
    if _is_divided(reduction, weight):
        weight = _product(mask, weight)
        (total,) = _totals(step, weight)
        return _unshared(step, tf.math.divide_no_nan(weight, total))
    if mask is None or reduction is None:
        return weight
    mask = tf.cast(mask, tf.float32)
    places, unmasked = _totals(step, tf.ones_like(mask), mask)
    return _product(mask * tf.math.divide_no_nan(places, unmasked), weight)


def _product(mask: Any, weight: Any) -> tf.Tensor:
    """Sample weights [B, ...], of a mask and of sample weights that may lack its last dimensions or have 1 more."""
    if mask is None or weight is None:
        return tf.cast(1 if mask is weight else weight if mask is None else mask, tf.float32)
    mask, weight = tf.cast(mask, tf.float32), tf.cast(weight, tf.float32)
    if weight.shape.rank == mask.shape.rank + 1 and weight.shape[-1] == 1:
        weight = tf.squeeze(weight, -1)
    while weight.shape.rank < mask.shape.rank:
        weight = weight[..., None]
    return mask * weight


def _totals(step: Step, *values: tf.Tensor) -> list[tf.Tensor]:
    """Sums over all places of all replicas."""
    own = tf.stack([tf.reduce_sum(value) for value in values]) * tf.cast(step.has_rows, tf.float32)
    return tf.unstack(step.all_reduce(tf.distribute.ReduceOp.SUM, own), num=len(values))


def _unshared(step: Step, weight: tf.Tensor) -> tf.Tensor:
    """`weight`, but for the replica's share, by which its loss will be multiplied."""
    if step.share is None:
        step.exchange_rows()
    return weight if step.share is None else tf.math.divide_no_nan(weight, step.share)
