"""Policy: how a tensor is divided into parts, one for each shard, so that all parts have the same shape."""

import dataclasses
import math
from collections.abc import Sequence

# Rows are kept whole unless their padding would take more than 1 / 64 of the tensor.
_PADDING = 64


@dataclasses.dataclass(frozen=True)
class Partition:
    """A division of a tensor into parts of equal shape: whole rows of its first axis, or a range of its elements.

    Elements are in the order of the flat tensor, so part i precedes part i + 1, unless rows are dealt out in turn. The
    last parts are padded, and may consist of padding only. The division depends on the shape alone, so it is equal on
    all replicas and in each run.

    Attributes:
      shape: Shape of the tensor.
      shards: Number of parts.
      by_rows: Whether parts consist of whole rows. Otherwise they are ranges of the flat tensor.
      in_turn: Whether part i has the rows i, i + shards, i + 2 * shards and so on, instead of consecutive rows. So each
        part of an embedding has as many frequent rows, which come first in most vocabularies.
    """

    shape: tuple[int, ...]
    shards: int
    by_rows: bool
    in_turn: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], shards: int) -> "Partition":
        """Returns the division of a tensor of `shape`: by rows if they divide into equal parts with little padding."""
        rows = shape[0] if shape else 1
        by_rows = bool(shape) and -rows % shards * _PADDING <= rows
        return cls(tuple(shape), shards, by_rows)

    @classmethod
    def of_table(cls, shape: Sequence[int], shards: int) -> "Partition":
        """Returns the division of an embedding's table of `shape`: its rows are dealt out in turn."""
        return cls(tuple(shape), shards, by_rows=True, in_turn=True)

    @property
    def rows(self) -> int:
        """Number of rows that are divided; elements of the flat tensor if not `by_rows`."""
        return self.shape[0] if self.by_rows else math.prod(self.shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each part, with its padding."""
        return (-(-self.rows // self.shards), *(self.shape[1:] if self.by_rows else ()))

    def part_shape_of(self, shard: int) -> tuple[int, ...]:
        """Returns the shape of a shard's part, which is the same for all."""
        del shard
        return self.part_shape

    @property
    def part_elements(self) -> int:
        """Number of elements of each part, with its padding."""
        return math.prod(self.part_shape)

    def elements_of(self, shard: int) -> int:
        """Returns the number of elements of a shard's part before its padding."""
        start, stop = (shard, self.rows) if self.in_turn else self.range_of(shard)
        return len(range(start, stop, self.shards if self.in_turn else 1)) * math.prod(self.part_shape[1:])

    @property
    def padding(self) -> int:
        """Number of rows of padding of all parts together."""
        return self.part_shape[0] * self.shards - self.rows

    def range_of(self, shard: int) -> tuple[int, int]:
        """Returns the first row of a shard's part, and the row after its last, without padding; not for `in_turn`."""
        size = self.part_shape[0]
        return min(shard * size, self.rows), min((shard + 1) * size, self.rows)
