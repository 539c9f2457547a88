"""Orders in which an epoch reads the examples of a data set, such as shuffled: functions of (epoch, positions)."""

import functools
import hashlib
from typing import Any, Protocol

import numpy as np

from tfdist.data.permutation import Permutation, random_numbers
from tfdist.data.validation import checked_count

_CHUNK = 1 << 14  # Positions computed in one call, which makes each of them cheaper.
_BLOCKS, _IN_BLOCK = 1, 2  # Give the two kinds of permutations different keys under one seed.
_GOLDEN_RATIO = (5**0.5 - 1) / 2


class Order(Protocol):
    """An order in which an epoch reads n examples. It may differ between epochs."""

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The indices of the examples at `positions` of this epoch, int64 [k] -> int64 [k]."""

    def __repr__(self) -> str:
        """A description that differs between orders, to compare them; without seed and number of examples."""


class Unshuffled:
    """The order in which examples are stored."""

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The indices of the examples at `positions`, int64 [k] -> int64 [k]."""
        return positions

    def __repr__(self) -> str:
        return "Unshuffled"


class Shuffled:
    """A permutation of the whole data set, new in each epoch. Computes 16384 positions at a time, in 1 MB of memory."""

    def __init__(self, n: int, seed: int):
        self._n, self._seed = n, seed
        self._chunk = functools.lru_cache(maxsize=2)(self._compute_chunk)

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The indices of the examples at `positions` of this epoch, int64 [k] -> int64 [k]."""
        numbers = positions // _CHUNK
        indices = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            indices[here] = self._chunk(epoch, number)[positions[here] - number * _CHUNK]
        return indices

    def __repr__(self) -> str:
        return "Shuffled"

    def _compute_chunk(self, epoch: int, number: int) -> np.ndarray:
        first = number * _CHUNK
        return Permutation(self._n, (self._seed, epoch))(np.arange(first, min(first + _CHUNK, self._n)))


class BlockShuffled:
    """Shuffles blocks of consecutive examples, the last maybe short, and examples within blocks: reads stay local."""

    def __init__(self, n: int, seed: int, block_size: int):
        self._n, self._seed, self._block_size = n, seed, block_size

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The indices of the examples at `positions` of this epoch, int64 [k] -> int64 [k]."""
        size, blocks = self._block_size, -(-self._n // self._block_size)
        order = Permutation(blocks, (self._seed, epoch, _BLOCKS))
        missing = blocks * size - self._n  # Elements that the short block lacks; it may be at any place.
        short_slot = int(order.inverse(np.array([blocks - 1]))[0])
        behind_short = positions >= (short_slot + 1) * size - missing
        slots, offsets = np.divmod(positions + behind_short * missing, size)
        present, which = np.unique(slots, return_inverse=True)
        of_slot = order(present)[which]
        short = of_slot == blocks - 1
        for length, here in ((size, ~short), (size - missing, short)):
            if np.any(here):
                within = Permutation(length, (self._seed, epoch, _IN_BLOCK))
                offsets[here] = within(offsets[here], of_slot[here])
        return of_slot * size + offsets

    def __repr__(self) -> str:
        return f"BlockShuffled({self._block_size})"


class Stratified:
    """An order that gives every part of an epoch the class proportions of the data, to one or two examples per class.

    Example j of the n_c examples of class c, in an order that depends on the epoch, gets the place (j + phase_c) / n_c.
    Phases follow the golden ratio (a Weyl sequence), since equal phases would form runs of equally large classes. Takes
    32 bytes per example, and sorts all examples at the start of an epoch.
    """

    def __init__(self, labels: np.ndarray, seed: int, *, shuffle: bool):
        self._seed, self._shuffle = seed, shuffle
        try:
            _, self._classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        except TypeError as error:
            raise TypeError(
                f"The classes in stratify_by must have one sortable type, numbers or strings, but {error}. Give each "
                "example a number or a name, and replace None."
            ) from error
        self._digest = hashlib.sha256(self._classes.astype("<i8").tobytes()).hexdigest()[:8]
        rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
        by_size = np.argsort(np.argsort(counts, kind="stable"))  # Classes of similar size get distant phases.
        phases = (0.5 + by_size * _GOLDEN_RATIO) % 1
        # For each position of the epoch, the index of its example among all examples sorted by class.
        self._slots = np.argsort((rank + np.repeat(phases, counts)) / np.repeat(counts, counts), kind="stable")
        self._sorted = functools.lru_cache(maxsize=1)(self._sort)

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The indices of the examples at `positions` of this epoch, int64 [k] -> int64 [k]."""
        return self._sorted(epoch if self._shuffle else 0)[self._slots[positions]]

    def __repr__(self) -> str:
        return f"Stratified({self._digest}, shuffle={self._shuffle}, phases)"

    def _sort(self, epoch: int) -> np.ndarray:
        """Indices of all examples sorted by class, and within a class in an order of the epoch, int64 [n]."""
        if not self._shuffle:
            return np.argsort(self._classes, kind="stable")
        return np.lexsort([random_numbers(np.arange(len(self._classes)), (self._seed, epoch)), self._classes])


def chosen_order(n: int, seed: int, shuffle: bool, block_size: int | None, stratify_by: Any) -> Order:
    """Returns the order that a `BalancedSharding`'s arguments ask for: stored, shuffled, in blocks, or stratified.

    Raises:
      ValueError: If `block_size` is not a positive integer, `stratify_by` does not hold one class per example, or both
        are given.
    """
    if stratify_by is not None:
        labels = np.asarray(stratify_by)
        if labels.shape != (n,) or block_size is not None:
            raise ValueError(
                f"stratify_by must hold one class for each of the {n} examples, in shape [{n}], and excludes "
                f"block_size, got shape {list(labels.shape)} and block_size={block_size}. Leave out one of them, or "
                "give the classes in the order of the source."
            )
        return Stratified(labels, seed, shuffle=shuffle)
    size = None if block_size is None else checked_count("block_size", block_size)
    if not shuffle:
        return Unshuffled()
    return Shuffled(n, seed) if size is None else BlockShuffled(n, seed, size)
