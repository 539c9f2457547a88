"""Policy: which shard updates which weight, for optimizers that need whole weights, such as Muon."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Ownership:
    """A division of a tensor into one whole part, which a single shard owns, and empty parts.

    Attributes:
      shape: Shape of the tensor.
      shards: Number of parts.
      owner: The shard that has the tensor.
    """

    shape: tuple[int, ...]
    shards: int
    owner: int

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    def part_shape_of(self, shard: int) -> tuple[int, ...]:
        """Returns the shape of a shard's part: that of the tensor, or no elements."""
        return self.shape if shard == self.owner else (0,)


def owners(sizes: Sequence[int], shards: int) -> list[int]:
    """Returns the owner of each tensor, so that all shards own about as many elements.

    Gives each tensor, the largest first, to the shard that owns the fewest elements so far. No shard then owns more
    than 4/3 of the least possible maximum.

    References:
      Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    """
    loads, owner = [0] * shards, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += sizes[i]
    return owner
