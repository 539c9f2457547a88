"""Policy: when a step gathers which whole weight, so that few of them are in memory at once."""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.strategies.collectives.buckets import known_bytes
from tfdist.strategies.sharding.weight_uses import Uses
from tfdist.strategies.sharding.work_ahead import WorkAhead


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


class _Traced(NamedTuple):
    gathered: WorkAhead[tf.Tensor]  # Whole weights.
    summed: WorkAhead[tf.Operation]  # Sums of gradients.
    begun: list[tf.Operation]  # Operations that must have run before the last second gather.


class StepGathers:
    """The gathers of weights in one replica's step, in the order of tracing.

    TensorFlow starts each operation once its inputs exist. Weights exist when the step begins, so all of them would be
    gathered at once. Instead a gather waits for the uses of the weights gathered before, except for the last ones, see
    `WorkAhead`. The next weights thus arrive while the present one is used.

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
        uses = [use for whole in traced.gathered.to_await() for use in Uses(whole).all]
        return list(dict.fromkeys([*uses, *traced.summed.to_await()]))

    def note(self, key: object | None, whole: tf.Tensor, weight: Any) -> None:
        """Notes that the step has gathered a weight, which `taken` returns by its key, if there is one."""
        traced = self._in_graph()
        if traced is not None:
            traced.gathered.add(whole, known_bytes(whole))
            if key is not None:
                self._known[key] = Gathered(whole, weakref.ref(weight), self._assignments.get(id(weight), 0))

    def note_assigned(self, weight: Any) -> None:
        """Notes that the step assigns a weight."""
        self._assignments[id(weight)] = self._assignments.get(id(weight), 0) + 1

    def note_summed(self, part: tf.Tensor, whole_bytes: int) -> None:
        """Notes that the step has summed a gradient of a weight of `whole_bytes`, of which this replica gets a part."""
        traced = self._in_graph()
        if traced is not None:
            traced.summed.add(part.op, whole_bytes)

    def taken(self, key: object) -> Gathered | None:
        """Returns a weight that should be gathered again for the backward pass in the current graph; else `None`.

        The last weight is still there, and a weight that the step has assigned since has another value.
        """
        known, traced = self._known.pop(key, None), self._in_graph()
        if known is None or traced is None or known.whole.graph is not tf.compat.v1.get_default_graph():
            return None
        if known.whole is traced.gathered.last:
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
        ahead = [*(traced.begun or own), *traced.summed.to_await()]
        traced.begun[:] = own
        return uses.traced_before_first(ahead)

    def _in_graph(self) -> _Traced | None:
        if tf.executing_eagerly():
            return None
        return self._traced.setdefault(tf.compat.v1.get_default_graph(), _Traced(WorkAhead(), WorkAhead(), []))
