"""A keyed permutation of 0..n-1 in constant memory: any element of it, without the others."""

import numpy as np

_ROUNDS = 8
_SHORT_ROUNDS, _FEW_BITS = 24, 10  # Few bits mix slowly.


class Permutation:
    """A permutation of 0..n-1, chosen by a key among very many, of which any part is computed by itself.

    An alternating Feistel network over the smallest power of two that holds n, walked until the result is below n (less
    than two walks on average). Costs a few hundred NumPy operations for all positions asked for together, so that many
    cost little each, down to 0.1 us; and no memory beyond them.

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
        self._keys = _state(key, _SHORT_ROUNDS if bits <= _FEW_BITS else _ROUNDS)

    def __call__(self, positions: np.ndarray, variants: np.ndarray | None = None) -> np.ndarray:
        """Which elements stand at `positions`, int64 [k] -> int64 [k].

        Args:
          positions: From 0 to n - 1.
          variants: For each position, of which permutation of a family under one key, int64 [k]. By default all of 0.
        """
        return self._walk(positions, variants, self._keys, 0)

    def inverse(self, elements: np.ndarray) -> np.ndarray:
        """Where `elements` stand, int64 [k] -> int64 [k]."""
        return self._walk(elements, None, self._keys[::-1], 1)

    def _walk(self, values, variants, keys, first):
        tweaks = np.zeros(1, np.uint64) if variants is None else hashed(variants, keys[0])
        values = self._mix(np.asarray(values).astype(np.uint64), tweaks, keys, first)
        while np.any(outside := values >= self.n):
            values[outside] = self._mix(values[outside], tweaks if variants is None else tweaks[outside], keys, first)
        return values.astype(np.int64)

    def _mix(self, values, tweaks, keys, first):
        low_bits, high_bits = self._low_bits, self._high_bits
        low_mask, high_mask = _mask(low_bits), _mask(high_bits)
        low, high = values & low_mask, values >> low_bits
        for number, key in enumerate(keys, first):
            if number % 2:
                low = low ^ (hashed(high ^ tweaks, key) & low_mask)
            else:
                high = high ^ (hashed(low ^ tweaks, key) & high_mask)
        return (high << low_bits) | low


def random_numbers(values: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
    """For each value a number that looks random and is always the same, int64 [k] -> uint64 [k]."""
    return hashed(values, _state(key, 1)[0])


def hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finalizer, whole numbers [k] -> uint64 [k]; sums and products are meant to overflow."""
    mixed = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _state(key: tuple[int, ...], numbers: int) -> np.ndarray:
    return np.random.SeedSequence([part % 2**64 for part in key]).generate_state(numbers, np.uint64)


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)
