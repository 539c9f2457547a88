"""A keyed permutation of 0..n-1 in constant memory: any element of it, without the others."""

import numpy as np

_ROUNDS = 8
_SHORT_ROUNDS = 24  # Few bits mix slowly.


class Permutation:
    """A permutation of 0..n-1, chosen by a key among very many, of which any part is computed by itself.

    An alternating Feistel network over the smallest power of two that holds n, walked until the result is below n (less
    than two walks on average). Costs a few dozen NumPy operations for all positions asked for at once, and no memory
    beyond them.

    Args:
      n: How many elements, from 1.
      key: Whole numbers, such as (seed, epoch), that choose the permutation.

    References:
      Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (cycle walking);
      Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014 (the mixing function).
    """

    def __init__(self, n: int, key: tuple[int, ...]):
        self.n = n
        bits = max((n - 1).bit_length(), 2)
        self._low_bits, self._high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        rounds = _ROUNDS if bits >= 24 else _SHORT_ROUNDS
        self._keys = np.random.SeedSequence([part % 2**64 for part in key]).generate_state(rounds, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Which elements stand at `positions`, int64 [k] -> int64 [k]."""
        return self._walk(positions, self._keys, 0)

    def inverse(self, elements: np.ndarray) -> np.ndarray:
        """Where `elements` stand, int64 [k] -> int64 [k]."""
        return self._walk(elements, self._keys[::-1], 1)

    def _walk(self, values, keys, first):
        values = self._mix(np.asarray(values).astype(np.uint64), keys, first)
        while np.any(outside := values >= self.n):
            values[outside] = self._mix(values[outside], keys, first)
        return values.astype(np.int64)

    def _mix(self, values, keys, first):
        low_bits, high_bits = self._low_bits, self._high_bits
        low_mask, high_mask = _mask(low_bits), _mask(high_bits)
        low, high = values & low_mask, values >> low_bits
        for number, key in enumerate(keys, first):
            if number % 2:
                low = low ^ (_hash(high, key) & low_mask)
            else:
                high = high ^ (_hash(low, key) & high_mask)
        return (high << low_bits) | low


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finalizer, uint64 [k] -> uint64 [k]; sums and products are meant to overflow."""
    with np.errstate(over="ignore"):
        mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
