"""Policy: when a step gathers which whole weight, so that few of them are in memory at once."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.strategies.sharding.weight_uses import Uses

AHEAD_BYTES = 16 << 20  # Weights of this size may be gathered, or their gradients summed, ahead; at least one each.


class Gathered(NamedTuple):
    """A weight that a step has gathered.

    Attributes:
      whole: The value, a symbolic tensor.
      weight: A reference to the variable.
      assignments: Number of assignments to the variable that the step had traced before.
    """

    whole: tf.Tensor
    weight: "weakref.ref[Any]"
    assignments: int


class Pending(NamedTuple):
    """An operation for which no other waits yet.

    Attributes:
      op: The operation.
      bytes: Bytes that may be freed once it has run.
    """

    op: tf.Operation
    bytes: int


class _Traced(NamedTuple):
    gathered: list[tf.Tensor]  # Those for which no gather waits yet.
    summed: list[Pending]
    begun: list[tf.Operation]  # Operations that must have run before the last second gather.


class StepGathers:
    """The gathers of weights in one replica's step, in the order of tracing.

    TensorFlow starts each operation once its inputs exist. Weights exist when the step begins, so all of them would be
    gathered at once. Instead a gather waits for the uses of the weights gathered before, except for the last ones, of
    up to 16 MiB. The next weights thus arrive while the present one is used.

    A gather waits only for operations that were traced before the first use of its weight. So no two operations wait
    for each other.
    """

    def __init__(self) -> None:
        self._traced: weakref.WeakKeyDictionary[tf.Graph, _Traced] = weakref.WeakKeyDictionary()
        self._known: dict[object, Gathered] = {}
        self._assignments: dict[int, int] = {}

    def before_first(self) -> list[tf.Operation]:
        """Returns the operations for which the gather of a weight in the current graph must wait."""
        traced = self._in_graph()
        if traced is None:
            return []
        uses = [use for whole in but_last(traced.gathered, _bytes) for use in Uses(whole).all]
        return list(dict.fromkeys([*uses, *(each.op for each in but_last(traced.summed))]))

    def note(self, key: object | None, whole: tf.Tensor, weight: Any) -> None:
        """Notes that the step has gathered a weight, which `taken` returns by its key, if there is one."""
        traced = self._in_graph()
        if traced is not None:
            traced.gathered.append(whole)
            if key is not None:
                self._known[key] = Gathered(whole, weakref.ref(weight), self._assignments.get(id(weight), 0))

    def note_assigned(self, weight: Any) -> None:
        """Notes that the step assigns a weight."""
        self._assignments[id(weight)] = self._assignments.get(id(weight), 0) + 1

    def note_summed(self, part: tf.Tensor, whole_bytes: int) -> None:
        """Notes that the step has summed a gradient of a weight of `whole_bytes`, of which this replica gets a part."""
        traced = self._in_graph()
        if traced is not None:
            traced.summed.append(Pending(part.op, whole_bytes))

    def taken(self, key: object) -> Gathered | None:
        """Returns a weight that should be gathered again for the backward pass in the current graph; else `None`.

        The last weight is still there, and a weight that the step has assigned since has another value.
        """
        known, traced = self._known.pop(key, None), self._in_graph()
        if known is None or traced is None or known.whole.graph is not tf.compat.v1.get_default_graph():
            return None
        if known.whole is traced.gathered[-1]:
            return None
        weight = known.weight()
        return known if self._assignments.get(id(weight), 0) == known.assignments else None

    def before_second(self, uses: Uses) -> list[tf.Operation]:
        """Returns the operations for which a second gather, for the uses of a weight in the backward pass, must wait.

        These are the gradients that the previous second gather waited for by itself, so that the next weight arrives
        one layer ahead; and sums of gradients.
        """
        traced = self._in_graph()
        if traced is None:
            return []
        own = uses.inputs_of_first
        ahead = [*(traced.begun or own), *(each.op for each in but_last(traced.summed))]
        traced.begun[:] = own
        return uses.traced_before_first(ahead)

    def _in_graph(self) -> _Traced | None:
        if tf.executing_eagerly():
            return None
        return self._traced.setdefault(tf.compat.v1.get_default_graph(), _Traced([], [], []))


def but_last(pending: list[Any], bytes_of: Callable[[Any], int] = lambda each: each.bytes) -> list[Any]:
    """Removes what must be done before the next one begins, and returns it: all but the last ones, of up to 16 MiB."""
    ahead, kept = 0, 0
    for each in reversed(pending):
        ahead += bytes_of(each)
        if kept and ahead > AHEAD_BYTES:
            break
        kept += 1
    done = pending[: len(pending) - kept]
    del pending[: len(pending) - kept]
    return done


def _bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
