"""The weight of one replica's loss in a training step of the user's own.

Keras' own steps have one loss, a mean over rows. It is weighted before its gradients are taken. A step of the user's
own may have any losses and optimizers, so its gradients are weighted instead. The graph shows the kind of their loss:

| loss of a replica | its gradients |
|---|---|
| a mean over its rows, or one number that is equal on all replicas | times its part of all rows |
| a sum over its rows, divided by a fixed number or by a sum over replicas | unchanged |
| a mix of both, or anything else | refused |
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import tensorflow as tf
from absl import logging

from tfdist.errors import LossReductionError
from tfdist.strategies.graph_analysis import may_differ
from tfdist.strategies.row_degree import Degree
from tfdist.strategies.step import Step, current_step

Reduction = Literal["mean", "sum"]

_REMEDY = (
    "Compute each loss as on one device: as a mean over the rows of the batch, such as `tf.reduce_mean(losses)` "
    "instead of `tf.reduce_sum(losses) / BATCH`, or `tf.nn.compute_average_loss(losses)` without `global_batch_size`. "
    "Add only penalties that do not depend on rows, and use no all-reduce. If the losses are such means but were not "
    "recognized, call `tfdist.step_losses_are('mean')` at the beginning of the step. If all losses are sums over rows, "
    "divided by the size of the global batch, call `tfdist.step_losses_are('sum')`."
)


def step_losses_are(reduction: Reduction) -> None:
    """Declares how the losses of the running training step depend on the rows of a replica.

    Only needed in your own `train_step`, if tfdist raises or warns that it cannot tell. Call it at the beginning of the
    step. Outside of a step, and on one device, it does nothing.

    Args:
      reduction: Use "mean" if each loss is a mean over the rows of the batch, or equal on all replicas. Use "sum" if
        each loss is a sum over rows, divided by a number that is equal on all replicas.

    Raises:
      ValueError: If `reduction` is neither.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"The losses of a step must be 'mean' or 'sum', got {reduction!r}.")
    step = current_step()
    if step is not None:
        step.reduction = reduction


def weighted(step: Step, gradients: Sequence[Any], optimizer: Any) -> list[Any]:
    """Weights the gradients of one replica's loss. Their sum over replicas is the gradient over the global batch.

    Costs a walk over the operations of the gradients, while the step is traced.

    Call it after `step.exchange_rows`. `gradients` may hold `None`. Errors name the optimizer.

    Raises:
      LossReductionError: If no such weight exists for the loss, or the gradients were summed over replicas before.
    """
    if (step.reduction or _reduction_of(step, gradients, optimizer)) == "sum":
        return list(gradients)
    return [times(gradient, step.weight) for gradient in gradients]


def weighted_for_sum(step: Step, gradient: Any, variable: str) -> Any:
    """Weights the gradient of one variable, which is summed over replicas before an optimizer gets it.

    Raises:
      LossReductionError: If the graph does not show whether the loss is a mean or a sum over rows.
    """
    if step.share is None or step.weights_loss:
        return gradient
    is_traced = tf.is_symbolic_tensor(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
    if step.reduction is None and is_traced and not step.has_static_rows:
        told = reduction_told_by(step.degrees.of_gradients([gradient]))
        if told not in ("mean", "sum"):
            raise LossReductionError(
                "With model_sharding='parameters' the gradient of each weight is summed over replicas as soon as it is "
                f"computed, but the graph of the gradient of {variable!r} does not show whether the loss is a mean or "
                "a sum over rows. Call `tfdist.step_losses_are('mean')` or `tfdist.step_losses_are('sum')` at the "
                "beginning of the step."
            )
    return weighted(step, [gradient], variable)[0]


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiplies a gradient, which may be `None` or `IndexedSlices`, by a number."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _reduction_of(step: Step, gradients: Sequence[Any], optimizer: Any) -> Reduction:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return "mean"
    if not all(tf.is_symbolic_tensor(leaf) for leaf in tf.nest.flatten(present, expand_composites=True)):
        _warn_of_guess("nothing is traced (`run_eagerly`)")
        return "mean"
    _check_not_summed(step, present, optimizer)
    if step.has_static_rows:
        _warn_of_guess(f"the number of rows is static for {_described(step, optimizer)}")
        return "mean"
    degrees = step.degrees.of_gradients(present)
    told = reduction_told_by(degrees)
    if told == "mixed":
        raise LossReductionError(
            "The loss of a training step must be a mean over the rows of its batch, or a sum over them divided by a "
            f"number that is the same on all replicas, but {_described(step, optimizer)} got gradients of sums and of "
            f"other losses, or of their total. {_REMEDY}"
        )
    if told == "sum":
        return "sum"
    if any(degree != 0.0 for degree in degrees):
        _warn_of_guess(f"the graph of the gradients does not show the reduction for {_described(step, optimizer)}")
    return "mean"


def reduction_told_by(degrees: Collection[Degree]) -> Literal["mean", "sum", "mixed"] | None:
    """Infers the reduction of a loss from the degrees of its gradients; `None` if they do not show the reduction.

    All gradients have the degree of their loss. So one gradient that surely belongs to a mean shows that the loss is a
    mean. The graphs of other gradients, such as those of float8 layers, need not be understood then.
    """
    sure = {degree for degree in degrees if degree in (0.0, 1.0)}
    is_mixed = any(degree is not None and math.isnan(degree) for degree in degrees)
    if len(sure) == 2 or (is_mixed and sure != {0.0}):
        return "mixed"
    return {0.0: "mean", 1.0: "sum"}[sure.pop()] if sure else None  # type: ignore[return-value]


def _check_not_summed(step: Step, gradients: Sequence[Any], optimizer: Any) -> None:
    if step.exchanges.by_user and not any(may_differ(each, alike=step.exchanges.results) for each in gradients):
        raise LossReductionError(
            "An optimizer sums gradients over all replicas by itself, but the gradients that "
            f"{_described(step, optimizer)} got were exchanged before, so each would count once for each replica. "
            "Leave out the all-reduce: `apply` weights gradients by rows and sums them."
        )


def _warn_of_guess(why: str) -> None:
    logging.log_first_n(
        logging.WARNING,
        "In a custom training step, %s: tfdist assumes that losses are means over the rows of the batch. If they are, "
        "call `tfdist.step_losses_are('mean')` at the beginning of the step; if they are sums divided by the size of "
        "the global batch, call `tfdist.step_losses_are('sum')`.",
        1,
        why,
    )


def _described(step: Step, optimizer: Any) -> str:
    of_model = f" in the training step of model {step.model.name!r}" if step.model is not None else ""
    return f"optimizer {getattr(optimizer, 'name', optimizer)!r}{of_model}"
