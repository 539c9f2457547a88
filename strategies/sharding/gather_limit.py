"""Policy: how many whole weights a step may gather ahead of their use, so that few are in memory at once."""

import weakref

import tensorflow as tf

_AHEAD = 2
# Operations that pass a weight on in another form. What computes with the weight follows them.
_VIEWS = {"Identity", "IdentityN", "Reshape", "Cast", "Transpose", "ExpandDims", "Squeeze", "StopGradient", "EnsureShape"}


class GatherLimit:
    """Makes the gathers of a step wait for the uses of earlier weights.

    TensorFlow starts each operation once its inputs exist. Weights exist when the step begins, so all of them would be
    gathered at once. Instead a gather waits for what uses the weights gathered before, except for the last one, and
    for the sums of gradients, except for the last one. The next weight thus arrives while the present one is used.

    Only operations that are traced before the gather count, so no two operations wait for each other.
    """

    def __init__(self) -> None:
        self._gathered: "weakref.WeakKeyDictionary[tf.Graph, list[tf.Tensor]]" = weakref.WeakKeyDictionary()
        self._summed: "weakref.WeakKeyDictionary[tf.Graph, list[tf.Tensor]]" = weakref.WeakKeyDictionary()

    def before_next(self) -> list[tf.Operation]:
        """Returns the operations for which the next gather in the current graph must wait."""
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        gathered, summed = self._gathered.get(graph, []), self._summed.get(graph, [])
        uses = [use for whole in gathered[: 1 - _AHEAD] for use in _uses(whole)]
        return list(dict.fromkeys([*uses, *(part.op for part in summed[: 1 - _AHEAD])]))

    def note_gathered(self, whole: tf.Tensor) -> None:
        """Notes that the current graph has gathered a weight."""
        _note(self._gathered, whole)

    def note_summed(self, part: tf.Tensor) -> None:
        """Notes that the current graph has summed a gradient of a weight, of which this replica gets a part."""
        _note(self._summed, part)


def _note(known: "weakref.WeakKeyDictionary[tf.Graph, list[tf.Tensor]]", tensor: tf.Tensor) -> None:
    if tf.is_symbolic_tensor(tensor):
        latest = known.setdefault(tensor.graph, [])
        latest.append(tensor)
        # A gather has waited for the rest, through those that it waits for.
        del latest[: -2 * _AHEAD]


def _uses(whole: tf.Tensor) -> list[tf.Operation]:
    """Returns the operations that compute with a weight, or with a view of it."""
    uses, ahead = [], [whole]
    while ahead:
        for operation in ahead.pop().consumers():
            if operation.type in _VIEWS:
                ahead += [output for output in operation.outputs if output.shape.num_elements() == whole.shape.num_elements()]
            else:
                uses.append(operation)
    return uses
