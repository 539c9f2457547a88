"""Finds in the graph of a step which operations use a gathered weight, and replaces the weight in some of them."""

from collections.abc import Iterable, Iterator

import tensorflow as tf

from tfdist._compat import tf_internals

# Operations that pass a weight on in another form. The operations that compute with the weight follow them.
_VIEWS = {"Identity", "Reshape", "Cast", "Transpose", "ExpandDims", "Squeeze", "StopGradient", "EnsureShape"}


class Uses:
    """The operations that compute with a tensor, directly or after a change of its type or shape.

    Attributes:
      all: These operations.
      backward: The operations of the backward pass that take the tensor, or a view of it from the forward pass.
    """

    def __init__(self, whole: tf.Tensor):
        self._whole = whole
        self.all = list(dict.fromkeys(_uses(whole)))
        self.backward = list(dict.fromkeys(_backward_uses(whole)))

    @property
    def inputs_of_first(self) -> list[tf.Operation]:
        """The operations that give the inputs of the first use in the backward pass, except for the weight."""
        order = self._order
        first = min(self.backward, key=lambda operation: order[operation.name])
        own = {tensor.ref() for tensor in (self._whole, *_views(self._whole))}
        return [tensor.op for tensor in first.inputs if tensor.ref() not in own]

    def traced_before_first(self, operations: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns those of the operations that were traced before the first use in the backward pass."""
        order = self._order
        first = min(order[operation.name] for operation in self.backward)
        return list(dict.fromkeys(each for each in operations if order.get(each.name, first) < first))

    def replace_in_backward(self, again: tf.Tensor) -> None:
        """Makes the backward pass use another tensor with the same value."""
        _replace(self._whole, again)

    @property
    def _order(self) -> dict[str, int]:
        return {operation.name: i for i, operation in enumerate(self._whole.graph.get_operations())}


def _is_view(operation: tf.Operation, tensor: tf.Tensor) -> bool:
    return operation.type in _VIEWS and operation.inputs[0].ref() == tensor.ref()


def _uses(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields each operation that computes with a tensor or a view of it."""
    for operation in tensor.consumers():
        if _is_view(operation, tensor):
            yield from _uses(operation.outputs[0])
        else:
            yield operation


def _backward_uses(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields each operation of the backward pass that takes a tensor or a view of it from the forward pass."""
    for operation in tensor.consumers():
        if tf_internals.is_of_gradients(operation):
            yield operation
        elif _is_view(operation, tensor):
            yield from _backward_uses(operation.outputs[0])


def _views(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    for operation in tensor.consumers():
        if _is_view(operation, tensor) and not tf_internals.is_of_gradients(operation):
            yield operation.outputs[0]
            yield from _views(operation.outputs[0])


def _replace(tensor: tf.Tensor, again: tf.Tensor) -> None:
    for operation in tensor.consumers():
        if tf_internals.is_of_gradients(operation):
            tf_internals.replace_input(operation, tensor, again)
        elif _is_view(operation, tensor) and any(_backward_uses(operation.outputs[0])):
            _replace(operation.outputs[0], tf_internals.copied(operation, again).outputs[0])
