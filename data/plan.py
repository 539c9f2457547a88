"""Which examples make up which global batch, and which replica gets which part of it. Whole numbers only."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.data.order import Order


@dataclasses.dataclass(frozen=True)
class Plan:
    """Global batches of a data set: batch k of an epoch depends on nothing but the order, the epoch, k and its size.

    Attributes:
      num_examples: n, from 1.
      global_batch_size: N, from 1.
      order: Of the examples in an epoch.
      drop_remainder: Whether to leave out the last batch of an epoch if it is short.
    """

    num_examples: int
    global_batch_size: int
    order: Order
    drop_remainder: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    def rows(self, step: int) -> int:
        """Examples in a global batch: N, but for a short last one."""
        return min(self.global_batch_size, self.num_examples - step * self.global_batch_size)

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """The examples of global batch `step` of an epoch, int64 [rows(step)]."""
        first = step * self.global_batch_size
        return self.order(epoch, np.arange(first, first + self.rows(step)))


def split(rows: int, weights: Sequence[float], at_most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Splits rows among replicas in proportion to weights, by largest remainder; none goes empty where rows suffice.

    Args:
      rows: How many, from 0.
      weights: By replica, each from 0; not all 0.
      at_most: The most that each replica takes; together at least `rows`.

    Returns:
      Rows by replica, their sum is `rows`. Of equal remainders the earlier replica's goes first.

    Raises:
      ValueError: If `at_most` leaves no room for so many rows.
    """
    replicas = len(weights)
    bounds = [rows] * replicas if at_most is None else list(at_most)
    at_least = [min(1, bound) if rows >= replicas else 0 for bound in bounds]
    if sum(bounds) < rows:
        raise ValueError(
            f"at_most must leave room for all rows, but {rows} rows are more than {bounds}, together {sum(bounds)}."
        )
    ideal = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64) * rows
    shares = [min(max(int(part), least), most) for part, least, most in zip(ideal, at_least, bounds, strict=True)]
    while (missing := rows - sum(shares)) != 0:
        change = 1 if missing > 0 else -1
        free = [r for r in range(replicas) if (shares[r] < bounds[r] if change > 0 else shares[r] > at_least[r])]
        # The replica that is furthest from its ideal, the earlier of two.
        chosen = max(free, key=lambda r: (change * (ideal[r] - shares[r]), -r))
        shares[chosen] += change
    return tuple(shares)
