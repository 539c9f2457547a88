"""In which order the examples of a data set come: pure functions from (epoch, positions) to indices."""

from typing import Protocol

import numpy as np

from tfdist.data.permutation import Permutation

_BLOCKS, _IN_BLOCK, _IN_CLASS = 1, 2, 3  # Keep the permutations of one seed apart.


class Order(Protocol):
    """An order of n examples, another in each epoch or always the same."""

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Which examples stand at `positions` of this epoch, int64 [k] -> int64 [k]."""


class Unshuffled:
    """As they are stored."""

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        return positions


class Shuffled:
    """A permutation of the whole data set, new in each epoch, in constant memory."""

    def __init__(self, n: int, seed: int):
        self._n, self._seed = n, seed

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        return Permutation(self._n, (self._seed, epoch))(positions)


class BlockShuffled:
    """Blocks of neighbours come in a shuffled order, and shuffled within: reads stay near each other.

    Blocks are permuted over the whole data set. The last one may be short.
    """

    def __init__(self, n: int, seed: int, block_size: int):
        self._n, self._seed, self._block_size = n, seed, block_size

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        size, blocks = self._block_size, -(-self._n // self._block_size)
        order = Permutation(blocks, (self._seed, epoch, _BLOCKS))
        missing = blocks * size - self._n  # Elements that the short block lacks, wherever it stands.
        short_slot = int(order.inverse(np.array([blocks - 1]))[0])
        behind_short = positions >= (short_slot + 1) * size - missing
        slots, offsets = np.divmod(positions + behind_short * missing, size)
        indices = np.empty_like(positions)
        for slot in np.unique(slots):
            here = slots == slot
            block = int(order(np.array([slot]))[0])
            length = size - missing if block == blocks - 1 else size
            within = Permutation(length, (self._seed, epoch, _IN_BLOCK, block))
            indices[here] = block * size + within(offsets[here])
        return indices


class Stratified:
    """Classes come evenly: any run of neighbours has the proportions of the whole, to one example of a class.

    Example j of n_c of class c takes the place (j + 1/2) / n_c of the epoch; who is example j changes with the epoch.
    Takes 12 bytes an example.
    """

    def __init__(self, labels: np.ndarray, seed: int, *, shuffle: bool):
        self._seed, self._shuffle = seed, shuffle
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        by_class = np.argsort(classes, kind="stable")
        first = np.cumsum(counts) - counts
        self._members = [by_class[start : start + count] for start, count in zip(first, counts, strict=True)]
        rank = np.arange(len(labels)) - np.repeat(first, counts)
        place = (rank + 0.5) / np.repeat(counts, counts)
        order = np.argsort(place, kind="stable")
        self._classes = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        self._ranks = rank[order]

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        classes, ranks = self._classes[positions], self._ranks[positions]
        indices = np.empty_like(positions)
        for number in np.unique(classes):
            here, members = classes == number, self._members[number]
            own = ranks[here]
            if self._shuffle:
                own = Permutation(len(members), (self._seed, epoch, _IN_CLASS, int(number)))(own)
            indices[here] = members[own]
        return indices
