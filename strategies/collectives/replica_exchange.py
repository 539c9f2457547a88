"""The exchange of one replica in one step, as its parts are added to the graph."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.collectives.transport import Gradient


@dataclasses.dataclass
class ReplicaExchange:
    """The exchange of one replica in one step: what it is given, and its results so far.

    Attributes:
      replica: Number of the replica of this worker.
      gradients: Its gradients.
      done: Number of steps that the optimizer has taken, int64 [].
      options: TensorFlow's `CommunicationOptions` for collectives.
      choice: The chosen codec of each group, int32 [groups]; `None` without codecs to choose from.
      old: The variables of the codec states.
      choices_of_units: The chosen codec of each unit, int32 [].
      joined_of_units: The sums of each unit, as few joined tensors.
      unchecked: Sums in which no codec has looked for an Inf or NaN, some of them joined.
      totals: The sums of gradients; the gradient itself in the place of a sum that is not there yet.
      new: The new codec states, in the order of `old`.
      finite: Whether the sums that codecs have checked are finite, bool [].
      seconds: Seconds of coding and of exchange, float64 [2].
    """

    replica: int
    gradients: Sequence[Gradient]
    done: tf.Tensor
    options: Any
    choice: Any
    old: list[tf.Variable]
    choices_of_units: list[tf.Tensor] = dataclasses.field(default_factory=list)
    joined_of_units: list[list[tf.Tensor]] = dataclasses.field(default_factory=list)
    unchecked: list[Any] = dataclasses.field(default_factory=list)
    totals: list[Any] = dataclasses.field(default_factory=list)
    new: list[tf.Tensor] = dataclasses.field(default_factory=list)
    finite: list[tf.Tensor] = dataclasses.field(default_factory=list)
    seconds: list[tf.Tensor] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = list(self.gradients)

    def members(self, positions: Sequence[int]) -> list[Gradient]:
        """Returns the gradients at some positions."""
        return [self.gradients[i] for i in positions]

    def next_states(self, count: int) -> list[tf.Tensor]:
        """Returns the next codec states, after those that `put_encoded` has replaced."""
        return [tf.convert_to_tensor(each) for each in self.old[len(self.new) : len(self.new) + count]]

    def put(self, positions: Sequence[int], sums: Sequence[Gradient]) -> None:
        """Puts sums in the places of their gradients."""
        for i, total in zip(positions, sums, strict=True):
            self.totals[i] = total

    def put_encoded(
        self,
        positions: Sequence[int],
        sums: Sequence[Gradient],
        states: Sequence[tf.Tensor],
        finite: tf.Tensor,
        seconds: tf.Tensor,
    ) -> None:
        """Puts sums in the places of their gradients, and adds what their codec gives beside them."""
        self.put(positions, sums)
        self.new += states
        self.finite.append(finite)
        self.seconds.append(seconds)

    def assign_states(self) -> tf.Tensor:
        """Assigns the new codec states. Returns True, for `tf.cond`."""
        for variable, value in zip(self.old, self.new, strict=True):
            variable.assign(value)
        return tf.constant(True)
