"""Finds from a graph whether replicas of a step may compute different values of a tensor."""

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals

_VARIABLE_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_EXCHANGES = {"CollectiveReduceV2", "CollectiveReduceV3", "CollectiveGatherV2"}
_LOOKUPS = {"LookupTableFind", "LookupTableFindV2"}  # Tables are equal on all replicas.
_DRAWS = ("Random", "Multinomial", "TruncatedNormal")
# Operations that call functions. Only their inputs are followed, not the draws and reads inside the functions.
_CALLS = {
    "If",
    "StatelessIf",
    "Case",
    "StatelessCase",
    "While",
    "StatelessWhile",
    "PartitionedCall",
    "StatefulPartitionedCall",
}


def may_differ(
    value: tf.Tensor | tf.IndexedSlices,
    unlike: Iterable[tf.Variable] = (),
    strict: bool = True,
    alike: Collection[Any] = (),
) -> bool:
    """Whether a value may differ between replicas: depends on a batch or random numbers, except through exchanges.

    Eager values do not show their origin, and may differ. Costs a walk over the operations that the value depends on,
    while the step is traced.

    Args:
      value: A value that each replica computes.
      unlike: Variables that differ between replicas. All other variables are equal.
      strict: Whether to count inputs that are usually, but not always, equal on replicas. These are the lengths of a
        batch's axes from the second on, unless they are static, and eager tensors that the program holds.
      alike: References to exchanged tensors, beside those that the operations show.
    """
    ahead = [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]
    if any(not tf.is_symbolic_tensor(leaf) for leaf in ahead):
        return tf.executing_eagerly()
    seen = set()
    while ahead:
        tensor = ahead.pop()
        operation = tensor.op
        kind = operation.type
        if operation in seen or kind in _EXCHANGES or tensor.ref() in alike or _is_length(tensor, of_any_batch=strict):
            continue
        seen.add(operation)
        inputs = [tensor for tensor in operation.inputs if tensor.dtype != tf.resource]
        handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
        if any(handle is operation.graph.capture(variable.handle) for handle in handles for variable in unlike):
            return True
        if kind in _VARIABLE_READS:
            continue
        outside = captured(operation)
        if outside is not None:
            if tf.is_symbolic_tensor(outside):
                ahead.append(outside)
            elif strict:
                return True
            continue
        if kind == "Placeholder" or any(word in kind for word in _DRAWS):
            return True
        if operation.op_def.is_stateful and kind not in _CALLS | _LOOKUPS:
            return True
        ahead += inputs
    return False


def _is_length(tensor: tf.Tensor, of_any_batch: bool) -> bool:
    """Whether a tensor is the length of an axis of a shape, such as `tf.shape(x)[1]`; static if `of_any_batch`.

    Otherwise any length counts but the dynamic number of rows.
    """
    operation = tensor.op
    if operation.type not in ("StridedSlice", "Unpack") or operation.inputs[0].op.type != "Shape":
        return False
    shape, place = operation.inputs[0].op.inputs[0].shape, tensor.value_index
    if operation.type == "StridedSlice":
        begin = tf.get_static_value(operation.inputs[1])
        if begin is None or operation.get_attr("shrink_axis_mask") != 1:
            return False
        place = int(begin[0])
    if shape.rank is None:
        return False
    return shape[place] is not None or (not of_any_batch and place % shape.rank != 0)


def captured(operation: tf.Operation) -> tf.Tensor | None:
    """The outer tensor that a function or branch has captured as this placeholder; `None` if there is none."""
    if operation.type != "Placeholder" or not isinstance(operation.graph, tf_internals.FuncGraph):
        return None
    return next((outside for outside, inside in operation.graph.captures if inside is operation.outputs[0]), None)
