"""Whether replicas of a step may compute unlike values of a tensor, as its graph tells."""

from collections.abc import Iterable

import tensorflow as tf

_VARIABLE_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_EXCHANGES = {"CollectiveReduceV2", "CollectiveReduceV3", "CollectiveGatherV2"}
_DRAWS = ("Random", "Stateless", "Multinomial", "TruncatedNormal")


def may_differ(value: tf.Tensor | tf.IndexedSlices, unlike: Iterable[tf.Variable] = ()) -> bool:
    """Whether a value depends on a batch, or on random numbers, other than by what replicas have exchanged.

    Eager values tell nothing of where they come from, and may differ. Costs a walk over the operations that the value
    depends on, while the step is traced.

    Args:
      value: What replicas compute.
      unlike: Variables that are not alike on all replicas, as all others are.
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
        if kind in _VARIABLE_READS:
            if any(operation.inputs[0] is operation.graph.capture(variable.handle) for variable in unlike):
                return True
        elif operation.op_def.is_stateful or kind == "Placeholder" or any(word in kind for word in _DRAWS):
            return True
        else:
            ahead += operation.inputs
    return False
