"""Which examples each global batch holds, and how its rows are split among replicas. Arithmetic on integers only."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.data.example_order import Order, Unshuffled


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The global batches of a data set. Batch k depends only on k, the epoch, the order and the batch size."""

    num_examples: int  # Number of examples, at least 1.
    global_batch_size: int  # Number of examples per global batch, at least 1.
    order: Order  # Order of the examples in an epoch.
    drop_remainder: bool = False  # Whether to leave out the last batch of an epoch if it is short.

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches, and thus of steps, in an epoch."""
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    @property
    def examples_per_epoch(self) -> int:
        """Number of examples in the global batches of an epoch, without those that `drop_remainder` leaves out."""
        return min(self.steps_per_epoch * self.global_batch_size, self.num_examples)

    def rows(self, step: int) -> int:
        """Number of examples in the global batch of a step; fewer than `global_batch_size` in a short last one."""
        return min(self.global_batch_size, self.num_examples - step * self.global_batch_size)

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """Indices of the examples in global batch `step` of an epoch, int64 [rows(step)]."""
        return self.examples(epoch, step * self.global_batch_size, self.rows(step))

    def examples(self, epoch: int, first: int, rows: int) -> np.ndarray:
        """Indices of the examples at positions `first` to `first + rows` of an epoch, int64 [rows]."""
        return self.order(epoch, np.arange(first, first + rows))

    def of_evaluation(self) -> "BatchPlan":
        """The plan for an evaluation of the same data: each example once, in stored order, with a short last batch."""
        return dataclasses.replace(self, order=Unshuffled(), drop_remainder=False)


def split(rows: int, weights: Sequence[float], at_most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Splits a batch's rows in proportion to replicas' weights, by largest remainder, with one or more each if it can.

    Weights are at least 0 and not all 0. No replica gets more rows than `at_most`. If remainders are equal, the earlier
    replica goes first.

    Raises:
      ValueError: If the sum of `at_most` is less than `rows`.
    """
    replicas = len(weights)
    bounds = [rows] * replicas if at_most is None else list(at_most)
    at_least = [min(1, bound) if rows >= replicas else 0 for bound in bounds]
    if sum(bounds) < rows:
        raise ValueError(
            f"The sum of at_most must be at least the number of rows, but {rows} rows are more than {bounds}, together "
            f"{sum(bounds)}. Use a smaller global batch, or larger limits."
        )
    ideal = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64) * rows
    shares = [min(max(int(part), least), most) for part, least, most in zip(ideal, at_least, bounds, strict=True)]
    while (missing := rows - sum(shares)) != 0:
        change = 1 if missing > 0 else -1
        free = [r for r in range(replicas) if (shares[r] < bounds[r] if change > 0 else shares[r] > at_least[r])]
        # Change the replica that is furthest from its ideal, the earlier one of equals.
        chosen = max(free, key=lambda r: (change * (ideal[r] - shares[r]), -r))
        shares[chosen] += change
    return tuple(shares)
