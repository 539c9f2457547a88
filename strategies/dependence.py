"""Whether replicas of a step may compute unlike values of a tensor, as its graph tells."""

from collections.abc import Iterable

import tensorflow as tf

_VARIABLE_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_EXCHANGES = {"CollectiveReduceV2", "CollectiveReduceV3", "CollectiveGatherV2"}
_DRAWS = ("Random", "Multinomial", "TruncatedNormal")
# Looked at from outside: what they draw or read inside is not seen.
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


# Of these a replica's own batch decides no more than how many rows it has, or how long they are.
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}


def may_differ(value: tf.Tensor | tf.IndexedSlices, unlike: Iterable[tf.Variable] = (), by_shape: bool = True) -> bool:
    """Whether a value depends on a batch, or on random numbers, other than by what replicas have exchanged.

    Eager values tell nothing of where they come from, and may differ. Costs a walk over the operations that the value
    depends on, while the step is traced.

    Args:
      value: What replicas compute.
      unlike: Variables that are not alike on all replicas, as all others are.
      by_shape: Whether to depend on the shape of a batch counts.
    """
    ahead = [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]
    if any(not tf.is_symbolic_tensor(leaf) for leaf in ahead):
        return tf.executing_eagerly()
    seen = set()
    while ahead:
        operation = ahead.pop().op
        kind = operation.type
        if operation in seen or kind in _EXCHANGES:
            continue
        seen.add(operation)
        inputs = [tensor for tensor in operation.inputs if tensor.dtype != tf.resource]
        handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
        if any(handle is operation.graph.capture(variable.handle) for handle in handles for variable in unlike):
            return True
        if kind in _VARIABLE_READS or (kind in _SHAPES and not by_shape) or _is_known_length(operation):
            continue
        captured = _captured(operation)
        if captured is not None:
            ahead += [captured] if tf.is_symbolic_tensor(captured) else []  # Others are constants of the program.
            continue
        if kind == "Placeholder" or any(word in kind for word in _DRAWS):
            return True
        if operation.op_def.is_stateful and kind not in _CALLS:
            return True
        ahead += inputs
    return False


def _is_known_length(operation: tf.Operation) -> bool:
    """Whether it looks up the length of an axis, as `tf.shape(x)[1]`, that is the same in all batches."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    shape, place = operation.inputs[0].op.inputs[0].shape, tf.get_static_value(operation.inputs[1])
    is_one = place is not None and operation.get_attr("shrink_axis_mask") == 1
    return bool(is_one and shape.rank is not None and shape[int(place[0])] is not None)


def _captured(operation: tf.Operation) -> tf.Tensor | None:
    """What a function or a branch has taken from around it, if this placeholder stands for that."""
    if operation.type != "Placeholder" or not isinstance(operation.graph, tf.__internal__.FuncGraph):
        return None
    return next((outside for outside, inside in operation.graph.captures if inside is operation.outputs[0]), None)
