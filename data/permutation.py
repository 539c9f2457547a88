"""A random permutation of 0..n-1, chosen by a key, to shuffle examples. Computes single elements in little memory."""

import numpy as np

_ROUNDS = 8
_SHORT_ROUNDS, _FEW_BITS = 24, 10  # Few bits need more rounds to mix well.


class Permutation:
    """A pseudorandom permutation of 0..n-1, chosen by a key. Any part of it can be computed alone.

    An alternating Feistel network over the smallest power of two that holds n, applied again until the result is below
    n (less than twice on average). A call costs a few hundred NumPy operations for any number of positions, so that a
    position of a large call costs down to 0.1 us. Needs no memory beyond the positions.

    Args:
      n: Number of elements, at least 1.
      key: Integers that choose the permutation, such as (seed, epoch).

    References:
      Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, for cycle walking.
      Steele et al., Fast Splittable Pseudorandom Number Generators, 2014, for the mixing function.
    """

    def __init__(self, n: int, key: tuple[int, ...]):
        self.n = n
        bits = max((n - 1).bit_length(), 2)
        self._low_bits, self._high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self._keys = _state(key, _SHORT_ROUNDS if bits <= _FEW_BITS else _ROUNDS)

    def __call__(self, positions: np.ndarray, variants: np.ndarray | None = None) -> np.ndarray:
        """Returns the elements of the permutation at `positions`, int64 [k] -> int64 [k].

        `variants` hold for each position the number of a permutation under the same key, int64 [k]; by default 0.
        """
        return self._walk(positions, variants, self._keys, 0)

    def inverse(self, elements: np.ndarray) -> np.ndarray:
        """Returns the positions at which the permutation has `elements`, int64 [k] -> int64 [k]."""
        return self._walk(elements, None, self._keys[::-1], 1)

    def _walk(self, values: np.ndarray, variants: np.ndarray | None, keys: np.ndarray, first: int) -> np.ndarray:
        tweaks = np.zeros(1, np.uint64) if variants is None else hashed(variants, keys[0])
        values = self._mix(np.asarray(values).astype(np.uint64), tweaks, keys, first)
        while np.any(outside := values >= self.n):
            values[outside] = self._mix(values[outside], tweaks if variants is None else tweaks[outside], keys, first)
        return values.astype(np.int64)

    def _mix(self, values: np.ndarray, tweaks: np.ndarray, keys: np.ndarray, first: int) -> np.ndarray:
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
    """Returns a pseudorandom number per value that depends only on value and key: int64 [k] -> uint64 [k]."""
    return hashed(values, _state(key, 1)[0])


def hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Applies the finalizer of SplitMix64, integers [k] -> uint64 [k]. Sums and products overflow on purpose."""
    mixed = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _state(key: tuple[int, ...], numbers: int) -> np.ndarray:
    return np.random.SeedSequence([part % 2**64 for part in key]).generate_state(numbers, np.uint64)


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)
